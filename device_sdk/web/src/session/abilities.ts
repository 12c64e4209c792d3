/** What of a task this SDK can do: vectors, parts, encodings, algorithms. */

import { FAMILIES, FLOATS, isKnown, MASKED_NAMES } from "../protocol/encodings.ts";
import { contentOf, EXCHANGE_KINDS, vectorsOf } from "../protocol/exchanges.ts";
import type { Question, Task } from "../protocol/messages.ts";
import { unknownMasking } from "./secure_tasks.ts";

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
  pfedme: { vectors: ["model"], parts: ["update"] },
  apfl: { vectors: ["model"], parts: ["update"] },
};

/** What this SDK can do for privacy, as a check-in says it. It adds no noise. */
export const PRIVACY: readonly string[] = ["clip", "secure"];

/** Return what of the task this device cannot do, for people; null if it can do all. `algorithms`: beside `plain`.
 * `exchanges`: kinds of questions. Throws ProtocolError on a question whose content is not as its kind says. */
export function unsupported(
  task: Task | Question,
  algorithms: readonly string[],
  exchanges: readonly string[],
): string | null {
  if (task.type === "question") return unknownQuestion(task, exchanges);
  const { algorithm } = task;
  const known = ["plain", ...algorithms];
  if (!known.includes(algorithm)) {
    return `the task asks for the algorithm ${algorithm}; this device knows ${known.join(", ")}`;
  }
  const exchange = EXCHANGES[algorithm]!;
  const sent = task.vectors.map((vector): [string, string] => [vector.name, vector.encoding]);
  // Whether the bundle has buffers is known once it is here.
  const parts = [...exchange.parts, ...("buffers" in task.parts ? ["buffers"] : [])];
  const families = task.secure === null ? FAMILIES : MASKED_NAMES;
  return (
    differing("sends the vectors", sent, exchange.vectors, FLOATS) ??
    unknownMasking(task) ??
    differing("asks for the parts", Object.entries(task.parts), parts, families) ??
    unknownNoise(task)
  );
}

function unknownNoise(task: Task): string | null {
  if (task.local_noise === null) return null;
  return "the task asks the device to add noise to its update; this device cannot do that";
}

function unknownQuestion(question: Question, exchanges: readonly string[]): string | null {
  const { kind, bundle, vectors } = question;
  const exchange = EXCHANGE_KINDS[kind];
  if (!exchanges.includes(kind) || exchange === undefined) {
    return `the question is of the kind ${kind}; this device knows ${exchanges.join(", ") || "none"}`;
  }
  contentOf(question);
  const expected = vectorsOf(question);
  if (expected.length > 0 && bundle === null) return `the question of the kind ${kind} names no bundle`;
  const sent = vectors.map((vector): [string, string] => [vector.name, vector.encoding]);
  return differing("sends the vectors", sent, expected, FLOATS);
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
