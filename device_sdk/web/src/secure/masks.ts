/**
 * Masks: numbers that look random to everybody who does not know their seed.
 *
 * A mask is the stream of ChaCha20 (RFC 8439) under the seed as its key, read as little-endian numbers of 32 bits. Masks
 * are added modulo 2^32.
 */

import { chacha20 } from "@noble/ciphers/chacha.js";

export const SEED_BYTES = 32;
/** A seed makes one mask, so its nonce is always zero. */
const NONCE = new Uint8Array(12);
/** Elements of the mask that are made at a time, which takes 0.5 MiB; the words take what they take. */
const PART = 2 ** 16;
/** Elements in a block of ChaCha20's stream. */
const BLOCK = 16;

/** Add the mask of a seed of 32 bytes to words, in place, modulo 2^32. */
export function addMask(words: Uint32Array, seed: Uint8Array): void {
  const zeros = new Uint8Array(4 * Math.min(PART, words.length));
  const stream = new Uint8Array(zeros.length);
  const mask = new Uint32Array(stream.buffer);
  for (let begin = 0; begin < words.length; begin += PART) {
    const part = words.subarray(begin, begin + PART);
    const bytes = 4 * part.length;
    chacha20(seed, NONCE, zeros.subarray(0, bytes), stream.subarray(0, bytes), begin / BLOCK);
    for (let place = 0; place < part.length; place++) part[place]! += mask[place]!; // an Uint32Array wraps
  }
}
