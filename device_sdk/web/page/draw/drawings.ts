/** The drawings on this device: as the model's data, and as a list in which each can be deleted. */

import type { Columns } from "../../src/index.ts";
import { make, makeSvg, the, write } from "../shell/elements.ts";
import type { Drawing } from "../shell/records.ts";
import { plural } from "../shell/words.ts";
import { FULL, SIDE, type Stroke } from "./preprocess.ts";

const DIGITS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9];

/** Return the drawings as the bundle of examples/digits.py takes them: x from 0 to 1, y the labels. */
export function columnsOf(drawings: readonly Pick<Drawing, "label" | "pixels">[]): Columns {
  const x = new Float32Array(drawings.length * SIDE * SIDE);
  drawings.forEach(({ pixels }, row) => {
    x.set(
      Float32Array.from(pixels, (value) => value / FULL),
      row * SIDE * SIDE,
    );
  });
  return {
    x: { values: x, shape: [drawings.length, 1, SIDE, SIDE] },
    y: { values: Int32Array.from(drawings, ({ label }) => label), shape: [drawings.length] },
  };
}

/** Return a digit with the fewest drawings: the one to draw next. */
export function scarcest(drawings: readonly Pick<Drawing, "label">[]): number {
  const counts = DIGITS.map((digit) => drawings.filter(({ label }) => label === digit).length);
  return counts.indexOf(Math.min(...counts));
}

/** Show the list, the newest first. */
export function showDrawings(drawings: readonly Drawing[], remove: (drawing: Drawing) => void): void {
  write(
    "mine-text",
    drawings.length === 0
      ? "None yet. What you draw stays on this device."
      : `${plural(drawings.length, "drawing")}, on this device alone. Press one’s button to delete it.`,
  );
  const rows = [...drawings].reverse().map((drawing, place) => {
    const name = `Delete drawing ${place + 1} of ${drawings.length}, a ${drawing.label}`;
    const button = make("button", { type: "button", "aria-label": name, title: "Delete" }, `${drawing.label}`);
    button.append(make("span", { "aria-hidden": "true" }, "✕"));
    button.addEventListener("click", () => remove(drawing));
    return make("li", {}, picture(drawing.strokes), button);
  });
  the("gallery").replaceChildren(...rows);
}

/** Put the focus where it goes on after the drawing in this place of the list was deleted. */
export function focusAfter(place: number): void {
  const buttons = the("gallery").querySelectorAll("button");
  (buttons[Math.min(place, buttons.length - 1)] ?? the("mine-title")).focus();
}

function picture(strokes: readonly Stroke[]): SVGElement {
  const lines = strokes.map((stroke) => {
    const points = stroke.length === 1 ? [stroke[0]!, stroke[0]!] : stroke;
    return makeSvg("polyline", { points: points.map((point) => point.join(",")).join(" ") });
  });
  return makeSvg("svg", { viewBox: "-0.08 -0.08 1.16 1.16", "aria-hidden": "true" }, ...lines);
}
