/** The curve of the rounds that ended: accuracy where it is measured, else loss. */

import { makeSvg } from "../shell/elements.ts";
import type { Finished, Status } from "./status.ts";

export interface Chart {
  readonly measure: "accuracy" | "loss";
  /** Where the rounds' values are, in the picture's units. */
  readonly points: readonly { readonly x: number; readonly y: number }[];
  readonly yTicks: readonly { readonly y: number; readonly text: string }[];
  readonly xTicks: readonly { readonly x: number; readonly text: string }[];
  /** The chart in one sentence. */
  readonly summary: string;
}

/** Whose examples the numbers are of. */
const OWN = "on the devices' own training examples";
export const WIDTH = 320;
export const HEIGHT = 170;
const LEFT = 44;
const RIGHT = WIDTH - 10;
const TOP = 10;
const BOTTOM = HEIGHT - 24;

/** Lay the chart out; null before the first round ended. */
export function chartOf(history: readonly Finished[]): Chart | null {
  const measure = history.some((row) => row.accuracy !== null) ? "accuracy" : "loss";
  const rows = history.filter((row) => row[measure] !== null);
  const first = rows[0];
  const last = rows.at(-1);
  if (first === undefined || last === undefined) return null;
  const largest = measure === "accuracy" ? 1 : roundUp(Math.max(...rows.map((row) => row.loss!)));
  const span = Math.max(1, last.round - first.round);
  const across = (round: number): number => LEFT + ((RIGHT - LEFT) * (round - first.round)) / span;
  const up = (value: number): number => BOTTOM - ((BOTTOM - TOP) * value) / largest;
  const middle = Math.round((first.round + last.round) / 2);
  const shown = valueWords(measure, last[measure]!);
  return {
    measure,
    points: rows.map((row) => ({ x: across(row.round), y: up(Math.max(0, Math.min(largest, row[measure]!))) })),
    yTicks: [0, largest / 2, largest].map((value) => ({ y: up(value), text: valueWords(measure, value) })),
    xTicks: [...new Set([first.round, middle, last.round])].map((round) => ({ x: across(round), text: `${round}` })),
    summary:
      rows.length === 1
        ? `${title(measure)} ${OWN} in round ${last.round}: ${shown}.`
        : `${title(measure)} ${OWN} in round ${last.round}: ${shown}; in round ${first.round} it was ` +
          `${valueWords(measure, first[measure]!)}.`,
  };
}

/** Return what stands below the chart, or in the place of one that is not there. */
export function chartWords(chart: Chart | null, kept: Status["private"]): string {
  if (kept === "none") return "What the devices measure is kept private, so no accuracy appears here.";
  if (chart === null) return "The first round is not over yet: then its accuracy appears here.";
  return kept === "noised" ? `${chart.summary} Noise is added to it, to protect people's data.` : chart.summary;
}

/** Return a measure's value for people. */
export function valueWords(measure: "accuracy" | "loss", value: number): string {
  return measure === "accuracy" ? `${Math.round(100 * value)} %` : value.toFixed(2);
}

/** Return the chart as a picture. Its sentence is its name; the table beside it has all numbers. */
export function drawChart({ points, yTicks, xTicks, summary }: Chart): SVGElement {
  const line = points.map(({ x, y }) => `${x.toFixed(1)},${y.toFixed(1)}`).join(" ");
  const end = points.at(-1)!;
  return makeSvg(
    "svg",
    { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": summary },
    ...yTicks.flatMap(({ y, text }) => [
      makeSvg("line", { class: "grid", x1: LEFT, x2: RIGHT, y1: y, y2: y }),
      makeSvg("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, text),
    ]),
    ...xTicks.map(({ x, text }) =>
      makeSvg("text", { x, y: HEIGHT - 6, "text-anchor": x > WIDTH - 40 ? "end" : "middle" }, text),
    ),
    makeSvg("polygon", { class: "area", points: `${points[0]!.x},${BOTTOM} ${line} ${end.x},${BOTTOM}` }),
    makeSvg("polyline", { class: "curve", points: line }),
    makeSvg("circle", { class: "last", cx: end.x, cy: end.y, r: 5 }),
  );
}

function title(measure: string): string {
  return `${measure[0]!.toUpperCase()}${measure.slice(1)}`;
}

/** Return the smallest of 1, 2, 5 times a power of ten that is not below. */
function roundUp(value: number): number {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1e-6)));
  return power * ([1, 2, 5].find((step) => step * power >= value) ?? 10);
}
