import { expect, test } from "vitest";
import { type WindowShape, Windows } from "../../src/data/windows.ts";

/** Push samples of a signal whose first channel is the time, its second one more. */
function pushed(shape: WindowShape, times: number[]): { windows: number[][]; gaps: number } {
  const windows = new Windows(2, shape);
  const found = times.flatMap((time) => windows.push(time, [time, time + 1]));
  return {
    windows: found.map(({ values }) => Array.from(values as Float32Array, (value) => Number(value.toFixed(4)))),
    gaps: windows.gaps,
  };
}

test("samples at the rate make windows, channels first", () => {
  const { windows } = pushed({ length: 2, rate: 10 }, [0, 0.1, 0.2, 0.3, 0.4]);
  expect(windows).toEqual([
    [0, 0.1, 1, 1.1],
    [0.2, 0.3, 1.2, 1.3],
  ]);
  expect(new Windows(3, { length: 1 }).push(0, [1, 2, 3])[0]!.shape).toEqual([3, 1]);
});

test("windows overlap", () => {
  const { windows } = pushed({ length: 3, overlap: 2, rate: 10 }, [0, 0.1, 0.2, 0.3]);
  expect(windows.map((one) => one.slice(0, 3))).toEqual([
    [0, 0.1, 0.2],
    [0.1, 0.2, 0.3],
  ]);
});

test.each([
  ["slower", [0, 0.15, 0.3, 0.45, 0.6]],
  ["faster", Array.from({ length: 31 }, (_, n) => n / 50)],
  ["uneven", [0, 0.01, 0.19, 0.2, 0.38, 0.41, 0.6]],
])("samples that come %s are brought to the rate", (_, times) => {
  // The first channel is the time, so interpolation gives the times of the rate.
  const { windows, gaps } = pushed({ length: 6, rate: 10 }, times);
  expect(windows.map((one) => one.slice(0, 6))).toEqual([[0, 0.1, 0.2, 0.3, 0.4, 0.5]]);
  expect(gaps).toBe(0);
});

test("no window spans a gap", () => {
  const times = [0, 0.1, 0.2, 5.05, 5.15, 5.25, 5.35];
  const { windows, gaps } = pushed({ length: 4, rate: 10, gap: 0.2 }, times);
  expect(windows.map((one) => one.slice(0, 4))).toEqual([[5.05, 5.15, 5.25, 5.35]]);
  expect(gaps).toBe(1);
});

test("a sample of the same time, or from before, is nothing", () => {
  const { windows } = pushed({ length: 3, rate: 10 }, [0, 0.1, 0.1, 0.05, 0.2]);
  expect(windows.map((one) => one.slice(0, 3))).toEqual([[0, 0.1, 0.2]]);
});

test("no error adds up over an hour", () => {
  const windows = new Windows(1, { length: 60, rate: 60 });
  let count = 0;
  for (let n = 0; n < 3600 * 60; n++) count += windows.push(1e6 + n / 60, [n]).length;
  expect(count).toBe(3600);
});

test.each([
  [{ length: 0 }, "length is 0; expected 1 or more samples"],
  [{ length: 4, overlap: 4 }, "overlap is 4 samples; expected 0 to 3, fewer than a window has"],
  [{ length: 4, rate: 0 }, "rate is 0 and gap 0.2; expected samples in a second, and more seconds than 1 / rate"],
  [{ length: 4, rate: 2 }, "rate is 2 and gap 0.2"],
])("windows that cannot be made: %o", (shape, words) => {
  expect(() => new Windows(1, shape)).toThrow(words);
});
