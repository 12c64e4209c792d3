/** How masked words are added and travel, by the bits that an element has before the mask (fixed_point.py of the protocol's
 * package). */

/** The most bits of an element that is added modulo 2^24, and travels in 3 bytes. */
const SHORT_BITS = 12;

/** Return m, where elements of this many bits are added modulo 2^m. */
export function modulusBits(bits: number): 24 | 32 {
  return bits <= SHORT_BITS ? 24 : 32;
}

/** Return how many updates of elements of this many bits can be added. */
export function mostUpdates(bits: number): number {
  return Math.floor((2 ** modulusBits(bits) - 1) / (2 ** bits - 1));
}

/** Return the encoding of masked words whose elements have this many bits before the mask. */
export function maskedEncoding(bits: number): "masked" | "masked24" {
  return modulusBits(bits) === 24 ? "masked24" : "masked";
}
