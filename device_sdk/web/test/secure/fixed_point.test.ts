import { expect, test } from "vitest";
import { countedWords, excessOf, randomFractions, shareOf, weightedWords } from "../../src/secure/fixed_point.ts";

test("roundings are uniform, and no function of a seed", () => {
  const [one, other] = [randomFractions(), randomFractions()];
  const drawn = Array.from({ length: 40_000 }, one); // more than one call of getRandomValues gives
  expect(drawn.every((fraction) => fraction >= 0 && fraction < 1)).toBe(true);
  const mean = drawn.reduce((sum, fraction) => sum + fraction, 0) / drawn.length;
  expect(Math.abs(mean - 0.5)).toBeLessThan(6 * Math.sqrt(1 / 12 / drawn.length)); // six standard deviations
  expect(new Set(drawn).size).toBeGreaterThan(39_990);
  expect(Array.from({ length: 8 }, other)).not.toEqual(drawn.slice(0, 8));
});

test("the expectation of a rounding is exact", () => {
  // 0.3 of 2 bits with the bound 1 is (0.3 + 1) * 1.5 = 1.95: 2 in 95 of 100 roundings.
  const fraction = randomFractions();
  const words = weightedWords(new Float32Array(20_000).fill(0.3), 0.5, 1, 2, fraction);
  const mean = words.subarray(0, -1).reduce((sum, word) => sum + word, 0) / 20_000;
  expect(Math.abs(mean - 1.95)).toBeLessThan(6 * Math.sqrt((0.95 * 0.05) / 20_000));
});

test("an element beyond the bound, one that is not finite, and a share that is none are refused", () => {
  const zero = (): number => 0;
  for (const value of [1.5, -1.5, Number.NaN, Number.POSITIVE_INFINITY]) {
    expect(() => weightedWords(Float32Array.of(0, value), 1, 1, 20, zero)).toThrow("the bound is 1");
  }
  for (const share of [0, -0.5, 1.01, Number.NaN]) {
    expect(() => weightedWords(Float32Array.of(0), share, 1, 20, zero)).toThrow("above 0 and at most 1");
  }
});

test("no word is beyond its bits, whatever the fraction", () => {
  const words = weightedWords(Float32Array.of(1, -1), 1, 1, 20, () => 1 - 2 ** -32);
  expect([...words]).toEqual([2 ** 20 - 1, 0, 2 ** 20 - 1]);
});

test("a weight is a share of the largest, and at most that", () => {
  expect([shareOf(30, null), shareOf(30, 120), shareOf(500, 120)]).toEqual([1, 0.25, 1]);
});

test("an update that rounding made too long is made shorter and rounded again", () => {
  for (let round = 0; round < 20; round++) {
    const update = new Float32Array(1000).fill(Math.fround(1 / Math.sqrt(1000)));
    const words = countedWords(update, 1, 1, 16, randomFractions());
    const elements = Array.from(words.subarray(0, 1000), (word) => (2 * word - 65535) / 65535);
    const norm = Math.sqrt(elements.reduce((sum, element) => sum + element ** 2, 0));
    expect(norm).toBeLessThanOrEqual(1);
    expect(norm).toBeCloseTo(1, 3);
  }
});

test("an update is as long as its bound, or a little longer or shorter", () => {
  const most = 2 ** 16 - 1;
  expect(excessOf(Uint32Array.of(most, 2 ** 15), 16)).toBeCloseTo(1, 3);
  expect(excessOf(Uint32Array.of(most - 1), 16)).toBeCloseTo((most - 2) ** 2 - most ** 2, 3);
});

test("an update whose rounding alone is too long is refused", () => {
  const zeros = new Float32Array(70_000);
  expect(() => countedWords(zeros, 1, 1, 8, randomFractions())).toThrow("more bits are needed");
});
