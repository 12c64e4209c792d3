import { describe, expect, test } from "vitest";
import { columnsOf, scarcest } from "../draw/drawings.ts";
import { bitmapOf, pixelsOf, type Stroke } from "../draw/preprocess.ts";
import { STROKES } from "./digit_strokes.ts";

const rows = (pixels: Uint8Array): number[][] =>
  Array.from({ length: 8 }, (_, row) => [...pixels.slice(8 * row, 8 * row + 8)]);
const moved = (strokes: readonly Stroke[], scale: number, by: number): Stroke[] =>
  strokes.map((stroke) => stroke.map(([x, y]) => [scale * x + by, scale * y + by] as const));

describe("what the model reads of a drawing", () => {
  test("a vertical line is as thick as the pen can be, centred, over the whole height", () => {
    const pixels = pixelsOf([
      [
        [0.9, 0.2],
        [0.9, 0.7],
      ],
    ]);
    for (const row of rows(pixels).slice(1, 7)) expect(row).toEqual([0, 0, 0, 16, 16, 0, 0, 0]);
  });

  test("each value counts the ink of its block of the bitmap", () => {
    const bitmap = bitmapOf(STROKES[5]!);
    const [row, column] = [3, 2];
    let ink = 0;
    for (let y = 0; y < 4; y++) for (let x = 0; x < 4; x++) ink += bitmap[(4 * row + y) * 32 + 4 * column + x]!;
    expect(ink).toBeGreaterThan(0);
    expect(pixelsOf(STROKES[5]!)[8 * row + column]).toBe(ink);
  });

  test("nothing is read of nothing, and a dot of a dot", () => {
    expect(Math.max(...pixelsOf([]))).toBe(0);
    const dot = pixelsOf([[[0.1, 0.1]]]);
    expect(dot.reduce((sum, value) => sum + value, 0)).toBeGreaterThan(20);
    expect(dot[8 * 3 + 3]).toBe(dot[8 * 4 + 4]);
  });

  test.each(Object.keys(STROKES))("a %s is the same wherever and however large it is drawn", (digit) => {
    const strokes = STROKES[Number(digit)]!;
    const difference = pixelsOf(moved(strokes, 0.3, 0.6)).map((value, place) =>
      Math.abs(value - pixelsOf(strokes)[place]!),
    );
    expect(Math.max(...difference)).toBeLessThanOrEqual(1); // pixels on an edge may be rounded to either side
  });

  test.each(Object.keys(STROKES))("a %s has the data set's ink, fills the height and stays in the middle", (digit) => {
    const pixels = pixelsOf(STROKES[Number(digit)]!);
    const mean = pixels.reduce((sum, value) => sum + value, 0) / 64;
    expect(mean).toBeGreaterThan(3.4); // scikit-learn's digits have 4.88 on average
    expect(mean).toBeLessThan(6);
    const inked = rows(pixels);
    expect(Math.max(...inked[0]!)).toBeGreaterThan(0);
    expect(Math.max(...inked[7]!)).toBeGreaterThan(0);
    expect(Math.max(...inked.map((row) => row[0]!), ...inked.map((row) => row[7]!))).toBeLessThanOrEqual(4);
    expect(Math.max(...pixels)).toBe(16);
  });
});

test("the drawings are the bundle's batch: pixels from 0 to 1, and labels", () => {
  const pixels = new Uint8Array(64).fill(16, 0, 1).fill(4, 63);
  const { x, y } = columnsOf([
    { label: 7, pixels },
    { label: 0, pixels: new Uint8Array(64) },
  ]);
  expect(x!.shape).toEqual([2, 1, 8, 8]);
  expect([x!.values[0], x!.values[63], x!.values[64]]).toEqual([1, 0.25, 0]);
  expect(y).toEqual({ values: Int32Array.of(7, 0), shape: [2] });
});

test("the next digit to draw is one with the fewest drawings", () => {
  expect(scarcest([])).toBe(0);
  const all = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9].map((label) => ({ label }));
  expect(scarcest([...all.slice(0, 4), ...all.slice(5)])).toBe(4);
});
