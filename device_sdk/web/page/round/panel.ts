/** The card of the round: what all devices do together. */

import { make, the, write } from "../shell/elements.ts";
import { plural } from "../shell/words.ts";
import { chartOf, chartWords, drawChart, valueWords } from "./chart.ts";
import { type Finished, roundWords, type Status } from "./status.ts";

/** What the chart and the table show. */
let drawn = "";

export function showRound(status: Status): void {
  write("round-text", roundWords(status));
  the("reports-box").hidden = status.state === "finished";
  const bar = the<HTMLProgressElement>("reports");
  bar.max = Math.max(1, status.goal);
  bar.value = Math.min(status.reports, bar.max);
  write("reports-text", `${status.reports} of ${status.goal}`);
  write("connected", `${plural(status.connected, "device")} connected`);
  const content = JSON.stringify(status.history);
  if (content === drawn) return;
  drawn = content;
  const chart = chartOf(status.history);
  the("chart").replaceChildren(...(chart === null ? [] : [drawChart(chart)]));
  write("chart-text", chartWords(chart, status.private));
  the("rounds").replaceChildren(...[...status.history].reverse().map(row));
}

function row({ round, accuracy, loss, devices }: Finished): HTMLElement {
  return make(
    "tr",
    {},
    make("th", { scope: "row" }, `${round}`),
    make("td", {}, accuracy === null ? "–" : valueWords("accuracy", accuracy)),
    make("td", {}, loss === null ? "–" : valueWords("loss", loss)),
    make("td", {}, `${devices}`),
  );
}
