/**
 * An update that is no longer than its task allows, as its bytes mean it: an encoding that rounds may make it longer.
 *
 * McMahan, Ramage, Talwar and Zhang, "Learning Differentially Private Recurrent Language Models", arXiv 1710.06963,
 * algorithm 1: an update x of L2 norm n becomes x * min(1, C / n).
 */

import type { Encoding } from "../protocol/encodings.ts";
import { TrainingError } from "./errors.ts";

/** Encodings that are tried before zeros are sent. One is enough for nearly every update that is not clipped. */
const TRIES = 24;
/** The least part by which a second try is shorter: half of the distance of two float32. */
const LEAST_EXCESS = 2 ** -24;

interface ClippedUpdate {
  readonly content: Uint8Array;
  /** What the bytes mean; its L2 norm is at most the bound. */
  readonly meant: Float32Array;
  /** Whether the update was longer than the bound before it was encoded. */
  readonly clipped: boolean;
  /** The update after the clipping, before the encoding. */
  readonly whole: Float32Array;
}

/**
 * Scale an update to the L2 norm `clip` where it is longer, and encode it, so that what its bytes mean is no longer either.
 * left: what is added to it first. Throws TrainingError (diverged), ProtocolError (the encoding cannot hold it).
 */
export function encodeClipped(
  encoding: Encoding,
  update: Float32Array,
  left: Float32Array | undefined,
  seed: number,
  clip: number,
): ClippedUpdate {
  const norm = normOf(update, left);
  if (!Number.isFinite(norm)) {
    throw new TrainingError("diverged", "the update has an element that is not finite; a smaller lr may help");
  }
  const clipped = norm > clip;
  let factor = clipped ? clip / norm : 1;
  const whole = scaled(update, left, factor);
  let tried = whole;
  for (let attempt = 0; attempt < TRIES; attempt++) {
    const content = encoding.encode(tried, seed);
    const meant = encoding.decode(content, tried.length);
    const length = normOf(meant);
    if (length <= clip) return { content, meant, clipped, whole };
    // Rounding to nearest can give the same values again for an update that is little shorter: each try goes twice as
    // far as the one before.
    factor /= 1 + Math.max(length / clip - 1, LEAST_EXCESS) * 2 ** attempt;
    tried = scaled(update, left, factor);
  }
  const nothing = new Float32Array(update.length);
  return { content: encoding.encode(nothing, seed), meant: nothing, clipped, whole };
}

/** Return the L2 norm of the sum, added in doubles. */
function normOf(update: Float32Array, left?: Float32Array): number {
  let total = 0;
  for (let place = 0; place < update.length; place++) {
    const value = update[place]! + (left?.[place] ?? 0);
    total += value * value;
  }
  return Math.sqrt(total);
}

function scaled(update: Float32Array, left: Float32Array | undefined, factor: number): Float32Array {
  if (left === undefined && factor === 1) return update;
  return update.map((value, place) => (value + (left?.[place] ?? 0)) * factor);
}
