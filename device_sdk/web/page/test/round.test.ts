import { readFileSync } from "node:fs";
import { expect, test } from "vitest";
import { chartOf, chartWords, HEIGHT, WIDTH } from "../round/chart.ts";
import { readStatus, roundWords } from "../round/status.ts";

const example: unknown = JSON.parse(readFileSync(new URL("status.json", import.meta.url), "utf8"));
const row = (
  round: number,
  accuracy: number | null,
  loss: number | null = 1,
): Parameters<typeof chartOf>[0][number] => ({
  round,
  accuracy,
  loss,
  devices: 3,
});

test("the example of status.json is read as the coordinator writes it", () => {
  expect(readStatus(example)).toEqual(example);
  expect(roundWords(readStatus(example))).toBe("Round 4 of 40");
});

test("what is missing counts as not known", () => {
  const status = readStatus({ state: "odd", rounds: null, history: [{ round: 1, accuracy: "0.5" }] });
  expect(status).toMatchObject({ run: "", state: "running", round: 0, goal: 0, connected: 0 });
  expect(status.history).toEqual([{ round: 1, loss: null, accuracy: null, devices: 0 }]);
  expect(roundWords({ ...status, round: 2 })).toBe("Round 2");
  expect(roundWords({ ...status, round: 2, state: "paused" })).toBe("Round 2, paused");
  expect(roundWords({ ...status, round: 1, state: "finished" })).toBe("Finished after 1 round");
  expect(() => readStatus(null)).toThrow(TypeError);
});

test("the chart has accuracy from 0 to 100 %, the newest at the right", () => {
  const chart = chartOf([row(1, 0.2), row(2, null), row(5, 0.8)])!;
  expect(chart.measure).toBe("accuracy");
  expect(chart.yTicks.map(({ text }) => text)).toEqual(["0 %", "50 %", "100 %"]);
  expect(chart.xTicks.map(({ text }) => text)).toEqual(["1", "3", "5"]);
  expect(chart.points).toHaveLength(2); // a round that nobody measured has no point
  const [first, last] = chart.points;
  expect(first!.x).toBeLessThan(last!.x);
  expect(first!.y).toBeGreaterThan(last!.y);
  const height = chart.yTicks[0]!.y - chart.yTicks[2]!.y;
  expect((first!.y - last!.y) / height).toBeCloseTo(0.6);
  expect(chart.summary).toBe(
    "Accuracy on the devices' own training examples in round 5: 80 %; in round 1 it was 20 %.",
  );
});

test("without accuracy it has the loss", () => {
  const chart = chartOf([row(3, null, 2.3), row(4, null, 1.2)])!;
  expect(chart.measure).toBe("loss");
  expect(chart.yTicks.map(({ text }) => text)).toEqual(["0.00", "2.50", "5.00"]);
  expect(chart.summary).toBe("Loss on the devices' own training examples in round 4: 1.20; in round 3 it was 2.30.");
});

test("a private run says why there is no chart, or that its numbers have noise", () => {
  expect(readStatus({ private: "none" }).private).toBe("none");
  expect(readStatus({ private: 7 }).private).toBeNull();
  const chart = chartOf([row(1, 0.5)])!;
  expect(chartWords(null, null)).toMatch(/^The first round is not over yet/);
  expect(chartWords(null, "none")).toMatch(/^What the devices measure is kept private/);
  expect(chartWords(chart, null)).toBe(chart.summary);
  expect(chartWords(chart, "noised")).toBe(`${chart.summary} Noise is added to it, to protect people's data.`);
});

test("one round is a chart, and none is none", () => {
  expect(chartOf([])).toBeNull();
  expect(chartOf([row(1, null, null)])).toBeNull();
  const chart = chartOf([row(1, 0.5)])!;
  expect(chart.summary).toBe("Accuracy on the devices' own training examples in round 1: 50 %.");
  for (const { x, y } of chart.points) {
    expect(x >= 0 && x <= WIDTH && y >= 0 && y <= HEIGHT).toBe(true);
  }
});
