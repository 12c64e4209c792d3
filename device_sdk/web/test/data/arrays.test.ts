import { describe, expect, test } from "vitest";
import { secondsToWait, TIMING } from "../../src/driver/timing.ts";
import type { Input } from "../../src/protocol/manifest.ts";
import { dtypeOf, FittedData } from "../../src/training/data.ts";
import { permutation } from "../../src/training/shuffling.ts";
import { seedPlus } from "../../src/training/train.ts";

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

// The mistakes that the Python SDK knows too are in mistakes.test.ts.
test("an array has the values that its shape takes, and a class that is left out fits", () => {
  const short = { x: { ...x, shape: [4, 2] }, y: { ...y, shape: [4] } };
  expect(() => new FittedData(short, [X, Y])).toThrow("array x has 6 values; its shape (4, 2) takes 8");
  new FittedData({ x, y: { ...y, values: Int32Array.of(0, -100, 2) } }, [X, Y]);
});

test("integers become the manifest's, floats become smaller", () => {
  const [batch] = [
    ...new FittedData(
      { x: { values: Uint8Array.of(0, 255), shape: [1, 2] }, y: { values: Uint8Array.of(2), shape: [1] } },
      [X, Y],
    ).batches(0, null),
  ];
  expect(batch!.arrays).toEqual([Float32Array.of(0, 255), BigInt64Array.of(2n)]);
  expect(dtypeOf(new Uint8ClampedArray(1))).toBe("uint8");
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
