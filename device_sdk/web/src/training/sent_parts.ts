/** The parts of a report as bytes, and what of them is left for the device's next update (error feedback). */

import { findEncoding, leavesResidual, RESIDUAL } from "../protocol/encodings.ts";
import { ProtocolError } from "../protocol/errors.ts";
import type { Task } from "../protocol/messages.ts";
import { encodeClipped } from "./clipping.ts";
import { TrainingError } from "./errors.ts";

interface SentParts {
  readonly contents: Record<string, Uint8Array>;
  /** The residual, if the update's encoding leaves one: a tied vector. */
  readonly left: Record<string, Float32Array>;
  /** Whether the update was longer than the task allows; null where it allows any. */
  readonly clipped: boolean | null;
}

/**
 * Encode the parts as the task asks. With top-k, what did not travel of the device's earlier updates is added to this
 * one, and what does not travel now is left for the next (Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", arXiv
 * 1809.07599, algorithm 1; here of whole updates). What clipping took away is not left: it would grow with each task.
 */
export function encodeParts(
  task: Pick<Task, "parts" | "seed" | "clip">,
  parts: Readonly<Record<string, Float32Array>>,
  tied: Readonly<Record<string, Float32Array>>,
): SentParts {
  const contents: Record<string, Uint8Array> = {};
  const left: Record<string, Float32Array> = {};
  let clipped: boolean | null = null;
  try {
    for (const [name, asked] of Object.entries(task.parts)) {
      const encoding = findEncoding(asked);
      const lossy = name === "update" && leavesResidual(asked);
      const before = lossy ? tied[RESIDUAL] : undefined;
      if (name === "update" && task.clip !== null) {
        const sent = encodeClipped(encoding, parts[name]!, before, task.seed, task.clip);
        contents[name] = sent.content;
        clipped = sent.clipped;
        if (lossy) left[RESIDUAL] = sent.whole.map((value, place) => value - sent.meant[place]!);
        continue;
      }
      const part = parts[name]!.map((value, place) => value + (before?.[place] ?? 0));
      const content = encoding.encode(part, task.seed);
      contents[name] = content;
      if (lossy) {
        const meant = encoding.decode(content, part.length);
        left[RESIDUAL] = part.map((value, place) => value - meant[place]!);
      }
    }
  } catch (error) {
    if (error instanceof ProtocolError) throw new TrainingError("diverged", error.text);
    throw error;
  }
  return { contents, left, clipped };
}
