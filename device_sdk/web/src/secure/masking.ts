/**
 * An update as masked words, for secure aggregation with a helper.
 *
 * The clipped update becomes whole numbers of a few bits each, and a mask is added to each modulo 2^32 or 2^24. The mask's seed is
 * sealed for the helper. Whoever knows the seed, or how the numbers were rounded, learns more than a sum: both come from
 * `crypto.getRandomValues`. This file and what it imports are fetched with the first task of secure aggregation alone.
 */

import { toHex } from "../protocol/hex.ts";
import { modulusBits } from "../protocol/word_sizes.ts";
import { signedSeed } from "./about.ts";
import { countedWords, randomFractions } from "./fixed_point.ts";
import { addMask, SEED_BYTES } from "./masks.ts";
import { seal } from "./sealed.ts";

/** What leaves the device of an update. */
export interface MaskedUpload {
  /** The masked words, as they travel: 4 bytes to an element, the weight last. */
  readonly content: Uint8Array;
  /** The mask's seed, sealed for the helper: 80 bytes in hexadecimal digits. */
  readonly sealed: string;
  /** Ed25519, by the device's own key, of `signedSeed`: 64 bytes in hexadecimal digits. */
  readonly signature: string;
}

/** How an update is written as words. */
export interface Counted {
  /** Its weight as a share of the largest one. */
  readonly share: number;
  /** What its staleness leaves of it: above 0 and at most 1. */
  readonly factor: number;
  /** The L2 norm that it was clipped to. */
  readonly bound: number;
  readonly bits: number;
}

export type Sign = (content: Uint8Array<ArrayBuffer>) => Promise<Uint8Array>;

/** What is drawn at random. Tests give others. */
export interface Draws {
  readonly fraction: () => number;
  readonly seed: Uint8Array;
  /** The private key of one use, with which the seed is sealed. */
  readonly oneUse?: Uint8Array;
}

/**
 * Mask a clipped update and seal the mask's seed.
 *
 * about: as `aboutUpdate` returns. helper: its public key. sign: signs with the device's own key. Rejects with RangeError (a
 * share, a factor or an element out of range), and with Error where the helper's key is of small order.
 */
export async function maskUpdate(
  update: Float32Array,
  { share, factor, bound, bits }: Counted,
  about: Uint8Array,
  helper: Uint8Array,
  sign: Sign,
  draws: Draws = { fraction: randomFractions(), seed: crypto.getRandomValues(new Uint8Array(SEED_BYTES)) },
): Promise<MaskedUpload> {
  if (!(factor > 0 && factor <= 1)) {
    throw new RangeError(`a factor of ${factor} was given; expected above 0 and at most 1`);
  }
  const scale = Math.fround(share * factor);
  const counted = update.map((value) => value * scale);
  const words = countedWords(counted, share, bound, bits, draws.fraction);
  const sealed = seal(draws.seed, helper, about, draws.oneUse);
  addMask(words, draws.seed);
  const signature = await sign(signedSeed(about, sealed));
  return { content: packed(words, bits), sealed: toHex(sealed), signature: toHex(signature) };
}

/** Return masked words as they travel: little-endian, 4 bytes each, or the lower 3 where they are added modulo 2^24. */
export function packed(words: Uint32Array<ArrayBuffer>, bits: number): Uint8Array<ArrayBuffer> {
  if (modulusBits(bits) === 32) return new Uint8Array(words.buffer);
  const content = new Uint8Array(3 * words.length);
  for (let place = 0; place < words.length; place++) {
    const word = words[place]!;
    content[3 * place] = word; // an Uint8Array keeps the lower byte
    content[3 * place + 1] = word >>> 8;
    content[3 * place + 2] = word >>> 16;
  }
  return content;
}

/** Return whether something can be sealed for this key. What is sealed for one of small order anybody can open. */
export function isKey(helper: Uint8Array): boolean {
  try {
    seal(new Uint8Array(0), helper, new Uint8Array(0));
    return true;
  } catch {
    return false;
  }
}
