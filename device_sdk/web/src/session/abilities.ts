/** What of a task this SDK can do: vectors, parts, encodings, algorithms. */

import { FAMILIES, FLOATS, isKnown } from "../protocol/encodings.ts";
import type { Evaluate, Task } from "../protocol/messages.ts";

interface Exchange {
  readonly vectors: readonly string[];
  readonly parts: readonly string[];
}

/** Algorithm -> the vectors that a task must have, and the parts that its report must have (PROTOCOL.md, 4). */
const EXCHANGES: Readonly<Record<string, Exchange>> = {
  plain: { vectors: ["model"], parts: ["update"] },
  scaffold: { vectors: ["model", "control"], parts: ["update", "control"] },
  "scaffold-gradient": { vectors: ["model", "control"], parts: ["update", "control"] },
  feddyn: { vectors: ["model"], parts: ["update"] },
  ditto: { vectors: ["model"], parts: ["update"] },
  fedrep: { vectors: ["model"], parts: ["update"] },
};

/** Return what of the task this device cannot do, for people; null if it can do all. `algorithms`: beside `plain`. */
export function unsupported(task: Task | Evaluate, algorithms: readonly string[]): string | null {
  const algorithm = task.type === "task" ? task.algorithm : "plain";
  const known = ["plain", ...algorithms];
  if (!known.includes(algorithm)) {
    return `the task asks for the algorithm ${algorithm}; this device knows ${known.join(", ")}`;
  }
  const exchange = EXCHANGES[algorithm]!;
  const sent = task.vectors.map((vector): [string, string] => [vector.name, vector.encoding]);
  // Whether the bundle has buffers is known once it is here.
  const buffers = task.type === "task" && "buffers" in task.parts ? ["buffers"] : [];
  return (
    differing("sends the vectors", sent, exchange.vectors, FLOATS) ??
    (task.type === "task"
      ? differing("asks for the parts", Object.entries(task.parts), [...exchange.parts, ...buffers], FAMILIES)
      : null)
  );
}

function differing(
  what: string,
  given: readonly [string, string][],
  names: readonly string[],
  families: readonly string[],
): string | null {
  const same = JSON.stringify(given.map(([name]) => name).sort()) === JSON.stringify([...names].sort());
  if (same && given.every(([, encoding]) => isKnown(encoding, families))) return null;
  const listed = given.map(([name, encoding]) => `${name} (${encoding})`).join(", ");
  return `the task ${what} ${listed}; this device knows ${names.join(", ")} (${families.join(", ")})`;
}
