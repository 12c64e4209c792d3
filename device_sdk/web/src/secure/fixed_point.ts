/**
 * Updates as whole numbers that are added modulo 2^32 or 2^24 (fixed_point.py of the protocol's package).
 *
 * An update x of L2 norm at most C becomes P numbers of q bits: u = (x + C) / step with step = 2 C / (2^q - 1), rounded up
 * or down at random, so that the expectation is exact. One more number has the update's weight.
 */

/** Most bytes that `crypto.getRandomValues` gives at a time. */
const RANDOM_BYTES = 65536;
/** How often an update is rounded before it is given up. Two are enough for nearly all. */
const ATTEMPTS = 64;

/**
 * Return the function that draws the next fraction for a rounding: uniform in [0, 1), multiples of 2^-32.
 *
 * They come from the browser's generator for secrets, not from the task's seed: the coordinator knows the seed, and from
 * the roundings it could tell more of an update than the sum says.
 */
export function randomFractions(): () => number {
  const drawn = new Uint32Array(RANDOM_BYTES / 4);
  let used = drawn.length;
  return () => {
    if (used === drawn.length) {
      crypto.getRandomValues(drawn);
      used = 0;
    }
    return drawn[used++]! * 2 ** -32;
  };
}

/** Return an update's weight as a share of the largest one. null: all updates weigh the same. */
export function shareOf(examples: number, mostWeight: number | null): number {
  return mostWeight === null ? 1 : Math.min(examples, mostWeight) / mostWeight;
}

/**
 * Return an update, and last its weight, as whole numbers below 2^bits: P + 1 of them.
 *
 * update: P elements as they count, that is clipped to `bound` (L2) and then multiplied by `share` and by what its
 * staleness leaves of it. share: its weight as a share of the largest one, above 0 and at most 1. fraction: draws the
 * next fraction in [0, 1), which decides a rounding. Throws RangeError where an element is not finite or beyond the bound,
 * and on another share.
 */
export function weightedWords(
  update: Float32Array,
  share: number,
  bound: number,
  bits: number,
  fraction: () => number,
): Uint32Array<ArrayBuffer> {
  if (!(share > 0 && share <= 1)) {
    throw new RangeError(`a weight's share of ${share} was given; expected above 0 and at most 1`);
  }
  const most = 2 ** bits - 1;
  const scale = most / (2 * bound);
  const words = new Uint32Array(update.length + 1);
  for (let place = 0; place < update.length; place++) {
    const value = update[place]!;
    if (!(Math.abs(value) <= bound)) {
      throw new RangeError(`an element of magnitude ${Math.abs(value)} was given; the bound is ${bound}`);
    }
    words[place] = Math.min(Math.floor((value + bound) * scale + fraction()), most);
  }
  words[update.length] = Math.min(Math.floor(share * most + fraction()), most);
  return words;
}

/**
 * Return the words of an update that mean none that is longer than `bound` either: where rounding made it longer, the
 * update is made a little shorter and rounded once more. The arguments are those of `weightedWords`; `update` is changed in
 * place. Throws RangeError as that does, and where `bits` are too few for so many elements.
 */
export function countedWords(
  update: Float32Array,
  share: number,
  bound: number,
  bits: number,
  fraction: () => number,
): Uint32Array<ArrayBuffer> {
  const most = 2 ** bits - 1;
  for (let attempt = 0; attempt < ATTEMPTS; attempt++) {
    const words = weightedWords(update, share, bound, bits, fraction);
    const excess = excessOf(words.subarray(0, -1), bits);
    if (excess <= 0) return words;
    // The square of a rounded update's length varies by about 2 `most` from draw to draw.
    const length = update.reduce((sum, value) => sum + value * value, 0) * (most / bound) ** 2;
    const kept = 1 - (excess + 4 * most) / length;
    if (!(kept > 0)) break;
    const scale = Math.sqrt(kept);
    for (let place = 0; place < update.length; place++) update[place]! *= scale;
  }
  throw new RangeError(
    `${update.length} elements of ${bits} bits are longer than the bound ${bound} however they are rounded; more bits are needed`,
  );
}

/**
 * Return how much the square of an update's L2 norm, as its words mean it, is above that of the bound, in units of
 * (bound / (2^bits - 1))^2: 0 or less only where the update is no longer than the bound.
 */
export function excessOf(words: Uint32Array, bits: number): number {
  const most = 2 ** bits - 1;
  let squares = 0;
  for (const word of words) squares += (2 * word - most) ** 2;
  return squares * (1 + words.length * 2 ** -52) - most ** 2; // no sum of doubles is off by more
}
