import { describe, expect, test } from "vitest";
import { secondsToWait, TIMING } from "../src/driver/timing.ts";
import type { Input } from "../src/protocol/manifest.ts";
import { examplesOf, FittedData } from "../src/training/data.ts";
import { permutation } from "../src/training/shuffling.ts";
import { seedPlus } from "../src/training/train.ts";

const X: Input = { name: "x", dtype: "float32", shape: [2], below: null, ignored: null };
const Y: Input = { name: "y", dtype: "int64", shape: [], below: 3, ignored: -100 };
const x = { values: Float32Array.of(0, 1, 2, 3, 4, 5), shape: [3, 2] };
const y = { values: Int32Array.of(0, 1, 2), shape: [3] };

describe("the order of the examples is the Python SDK's", () => {
  // As fleetlearn_device.training.shuffling.permutation gives them.
  test.each([
    [7, 0, 0, [2, 4, 6, 5, 1, 0, 3]],
    [10, 2026, 3, [8, 1, 2, 0, 3, 6, 7, 5, 4, 9]],
    [5, 2 ** 53 - 1, 999_999, [1, 3, 4, 0, 2]],
  ])("%i examples, seed %i, epoch %i", (examples, seed, epoch, expected) => {
    expect([...permutation(examples, seed, epoch)]).toEqual(expected);
  });
});

test("batches have whole rows, in order, and the last may be smaller", () => {
  const data = new FittedData({ y, x }, [X, Y]);
  expect(
    [...data.batches(2, null)].map(({ arrays, examples }) => [examples, ...arrays.map((one) => [...one])]),
  ).toEqual([
    [2, [0, 1, 2, 3], [0n, 1n]],
    [1, [4, 5], [2n]],
  ]);
  const order = [...permutation(3, 5, 1)];
  const [whole] = [...data.batches(0, 5, 1)];
  expect([...whole!.arrays[1]!]).toEqual(order.map(BigInt));
  expect([...whole!.arrays[0]!]).toEqual(order.flatMap((row) => [2 * row, 2 * row + 1]));
});

describe("data that do not fit are refused in words", () => {
  test.each([
    ["a name", { x, z: y }, "arrays x, z were given; expected x float32 (n, 2), y int64 (n,)"],
    [
      "a shape",
      { x: { ...x, shape: [2, 3] }, y: { ...y, shape: [2] } },
      "array x has shape (2, 3); expected (n, 2), n examples",
    ],
    [
      "a length",
      { x: { ...x, shape: [4, 2] }, y: { ...y, shape: [4] } },
      "array x has 6 values; its shape (4, 2) takes 8",
    ],
    [
      "labels as floats",
      { x, y: { ...y, values: Float32Array.of(0, 1, 2) } },
      "array y is a Float32Array; expected int64",
    ],
    [
      "a class",
      { x, y: { ...y, values: Int32Array.of(0, 3, 5) } },
      "array y has the value 3 in example 1 (the first is 0); expected 0 to 2, or -100 for what is left out. 2 of its 3 values",
    ],
    ["large values", { x: { ...x, values: Float64Array.of(0, 1, 2, 3, 4, 1e300) }, y }, "too large for float32"],
  ])("%s", (_, columns, text) => {
    expect(() => new FittedData(columns, [X, Y])).toThrow(text);
  });
  test("no examples, or not the same number", () => {
    expect(() => examplesOf({})).toThrow("expected at least one array");
    expect(() => examplesOf({ x, y: { ...y, shape: [2] } })).toThrow("x (3, 2), y (2,)");
  });
  test("a class that is left out fits", () => {
    new FittedData({ x, y: { ...y, values: Int32Array.of(0, -100, 2) } }, [X, Y]);
  });
  test("the first value that is not finite is found", () => {
    const values = Float32Array.of(0, 1, 2, Number.NaN, 4, 5);
    const data = new FittedData({ x: { ...x, values }, y }, [X, Y]);
    expect(data.firstNonfinite()).toContain("array x has the value NaN in example 1 (the first is 0), at [1]");
  });
});

test("seeds are added modulo 2^53", () => {
  expect(seedPlus(2 ** 53 - 1, 3)).toBe(2);
  expect(seedPlus(2 ** 52 + 12345, 2 ** 52)).toBe(12345);
  expect(seedPlus(5, 2)).toBe(7);
});

test("the wait before the next connection doubles up to its cap, and follows come-back", () => {
  expect([0, 1, 2, 100].map((failures) => secondsToWait(TIMING, failures, null, 1))).toEqual([0.5, 1, 2, 60]);
  expect(secondsToWait(TIMING, 9, 30, 0)).toBe(15);
  expect(secondsToWait(TIMING, 9, 30, 1)).toBe(45);
});
