/** The order in which a device takes its examples: the Python SDK's order, so that both train the same steps. */

import { SplitMix64 } from "../protocol/splitmix64.ts";

/**
 * Return the places of the examples, 0 to examples - 1, in their order in this pass.
 *
 * Each example gets a number of SplitMix64's, from the state mix(mix(seed) + epoch) on. The examples are sorted by the
 * upper halves of their numbers; equal halves keep their order.
 */
export function permutation(examples: number, seed: number, epoch: number): Uint32Array {
  const numbers = new SplitMix64(seed, epoch);
  const keys = new BigUint64Array(examples);
  const halves = new Uint32Array(keys.buffer); // little-endian, as every browser's machine is
  for (let example = 0; example < examples; example++) {
    numbers.next();
    halves[2 * example] = example;
    halves[2 * example + 1] = numbers.high;
  }
  keys.sort();
  return Uint32Array.from({ length: examples }, (_, place) => halves[2 * place]!);
}
