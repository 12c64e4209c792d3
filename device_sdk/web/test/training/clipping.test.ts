/** Whatever the update and its encoding, what the bytes mean is no longer than the task allows. */

import { describe, expect, test } from "vitest";
import { findEncoding } from "../../src/protocol/encodings.ts";
import { encodeClipped } from "../../src/training/clipping.ts";
import { TrainingError } from "../../src/training/errors.ts";
import { encodeParts } from "../../src/training/sent_parts.ts";

const NAMES = [
  "float32",
  "float16",
  "bfloat16",
  "int8",
  "int4",
  "topk-0.3",
  "topk-0.3-float16",
  "topk-0.3-int8",
] as const;

function norm(vector: Float32Array): number {
  return Math.sqrt(vector.reduce((sum, value) => sum + value * value, 0));
}

/** Numbers from -1 to 1, the same for each run (a linear congruential generator; Numerical Recipes). */
function draws(seed: number): () => number {
  let state = seed;
  return () => {
    state = (1664525 * state + 1013904223) % 2 ** 32;
    return state / 2 ** 31 - 1;
  };
}

describe("an update with a bound", () => {
  test("is scaled by hand", () => {
    const sent = encodeClipped(findEncoding("float32"), new Float32Array([3, 0, -4]), undefined, 1, 2.5);
    expect([...sent.meant]).toEqual([1.5, 0, -2]);
    expect(sent.clipped).toBe(true);
  });

  test("travels bit for bit where it is no longer", () => {
    const update = new Float32Array([3, -0, -4]);
    const sent = encodeClipped(findEncoding("float32"), update, undefined, 1, 5);
    expect([...sent.content]).toEqual([...new Uint8Array(update.buffer)]);
    expect(sent.clipped).toBe(false);
  });

  test("is shortened where rounding made it longer, which is no clipping", () => {
    const sent = encodeClipped(findEncoding("bfloat16"), new Float32Array([1.0059]), undefined, 1, 1.006);
    expect([...sent.meant]).toEqual([1]);
    expect(sent.clipped).toBe(false);
  });

  test("has diverged where it is not finite", () => {
    const update = new Float32Array([1, Number.NaN]);
    expect(() => encodeClipped(findEncoding("float32"), update, undefined, 1, 1)).toThrow(TrainingError);
  });

  test.each(NAMES)("is no longer than that as %s, whatever its length", (name) => {
    const next = draws(7);
    const encoding = findEncoding(name);
    for (const size of [1, 2, 63, 64, 257, 5000]) {
      for (const scale of [0, 1e-44, 1e-20, 1e-7, 1, 1e4, 1e30, 3e38]) {
        for (const bound of [1e-30, 4e-8, 1e-7, 0.5, 1000]) {
          const update = new Float32Array(size).map(() => scale * next());
          const left = size % 2 === 0 ? update.map((value) => -value / 3) : undefined;
          const sent = encodeClipped(encoding, update, left, size, bound);
          const meant = encoding.decode(sent.content, size);
          expect(norm(meant)).toBeLessThanOrEqual(bound);
          encoding.check(sent.content, size);
        }
      }
    }
  });
});

describe("the parts of a report", () => {
  const task = { parts: { update: "topk-0.5" }, seed: 1, clip: 2.5 };

  test("leave what did not travel of the clipped update, by hand", () => {
    const first = encodeParts(task, { update: new Float32Array([-4, 3]) }, {});
    expect([...first.left.residual!]).toEqual([0, 1.5]);
    expect(first.clipped).toBe(true);
    const second = encodeParts(task, { update: new Float32Array([0, 0.5]) }, first.left);
    expect([...findEncoding("topk-0.5").decode(second.contents.update!, 2)]).toEqual([0, 2]);
    expect(second.clipped).toBe(false);
  });

  test("are clipped in the update alone, and in none without a bound", () => {
    const parts = { update: new Float32Array([30, 40]), buffers: new Float32Array([30, 40]) };
    const both = { parts: { update: "float32", buffers: "float32" }, seed: 1 };
    const bounded = encodeParts({ ...both, clip: 5 }, parts, {});
    expect([...findEncoding("float32").decode(bounded.contents.update!, 2)]).toEqual([3, 4]);
    expect([...findEncoding("float32").decode(bounded.contents.buffers!, 2)]).toEqual([30, 40]);
    const free = encodeParts({ ...both, clip: null }, parts, {});
    expect([...findEncoding("float32").decode(free.contents.update!, 2)]).toEqual([30, 40]);
    expect(free.clipped).toBe(null);
  });
});
