/**
 * Tasks with secure aggregation: what of one this SDK cannot do, and what the device's owner demands, whatever the
 * coordinator says.
 */

import { type FailureCode, MOST_REPORTS, type Question, type Task } from "../protocol/messages.ts";
import { maskedEncoding, modulusBits, mostUpdates } from "../protocol/word_sizes.ts";

/** Algorithms that keep what an update was before it was clipped, or send something beside it. */
const KEEPING: readonly string[] = ["scaffold", "scaffold-gradient", "feddyn"];
/** Codes of failures whose text may say what the data are, or what was trained. */
const TELL_OF_DATA: readonly string[] = [
  "diverged",
  "bad-data",
  "runtime-error",
  "out-of-memory",
  "out-of-time",
  "killed",
  "disk-full",
];
const NOT_TOLD = "why is not told: the device masks its update, and the reason may tell of its data";
/** Why a task is given back whose update was masked before. */
export const MASKED_ONCE =
  "the device made a masked update for this task already, and it is lost: a second one could be added to another sum, and " +
  "the two sums compared";

/** The demands of a device's owner. What is left out is not demanded. */
export interface SecureDemands {
  /** Do no task without secure aggregation, and answer no question about the data. */
  readonly require?: boolean;
  /** The public key of the only helper that seeds are sealed for: 64 hexadecimal digits, as `fleetlearn-coordinator helper
   * status` prints it. A task for another one is given back. */
  readonly helper?: string;
  /** The fewest devices of a sum: a task that allows fewer is given back. */
  readonly minimum?: number;
  /** The smallest part of itself that an update may count for because it is late: a task that allows less is given back. With
   * `require` and without this, no update may count for less. */
  readonly leastFactor?: number;
}

/** Why a task is given back. */
export interface GivenBack {
  readonly code: FailureCode;
  readonly text: string;
}

/** Return the demands. Throws RangeError where they make no sense. */
export function checkSecureDemands(demands: SecureDemands): SecureDemands {
  const { helper, minimum, leastFactor } = demands;
  if (helper !== undefined && !/^[0-9a-f]{64}$/.test(helper)) {
    throw new RangeError(
      `secure.helper is ${helper}; expected 64 of 0-9 and a-f, as \`fleetlearn-coordinator helper status\` prints the ` +
        "helper's key",
    );
  }
  if (minimum !== undefined && !(Number.isInteger(minimum) && minimum >= 2 && minimum <= MOST_REPORTS)) {
    throw new RangeError(`secure.minimum is ${minimum}; expected 2 to ${MOST_REPORTS}, or to be left out`);
  }
  if (leastFactor !== undefined && !(leastFactor > 0 && leastFactor <= 1)) {
    throw new RangeError(`secure.leastFactor is ${leastFactor}; expected above 0, at most 1, or to be left out`);
  }
  return demands;
}

/** Return why the owner's demands forbid this; null if they do not. */
export function secureRefusal(demands: SecureDemands, task: Task | Question): GivenBack | null {
  const { require = false, helper, minimum, leastFactor } = demands;
  if (task.type === "question" || task.secure === null) {
    if (!require) return null;
    const lacking =
      task.type === "question"
        ? `the answer to the question ${task.kind} tells of this device's data`
        : "the task asks for the update as it is (no `secure`)";
    const text = "this device's owner lets it take part only with secure aggregation (secure.require), and";
    return { code: "unsupported", text: `${text} ${lacking}` };
  }
  const { secure } = task;
  if (helper !== undefined && secure.helper !== helper) {
    const names = secure.helper === null ? "no helper" : `the helper with the key ${secure.helper}`;
    return untrusted(
      `the task names ${names}, and this device's owner trusts the helper with the key ${helper} alone (secure.helper)`,
    );
  }
  if (minimum !== undefined && secure.minimum < minimum) {
    return untrusted(
      `the task lets the updates of ${secure.minimum} devices be added up, and this device's owner wants at least ` +
        `${minimum} (secure.minimum)`,
    );
  }
  if (require && leastFactor === undefined && secure.least_factor !== null) {
    return untrusted(
      `the task lets updates of other models, each for as little as ${secure.least_factor} of itself, be added to this one, ` +
        "so that a sum may be nearly one device's update; this device's owner has not said that this may be " +
        "(secure.leastFactor)",
    );
  }
  if (leastFactor !== undefined && secure.least_factor !== null && secure.least_factor < leastFactor) {
    return untrusted(
      `the task lets an update count for ${secure.least_factor} of itself, and this device's owner wants at least ` +
        `${leastFactor} (secure.leastFactor)`,
    );
  }
  return null;
}

/** Return why an update may not count for this part of itself; null if it may. With a factor near 0 for all others, the sum
 * would be nearly one device's update. */
export function factorRefusal(leastFactor: number, factor: number): GivenBack | null {
  if (factor >= leastFactor && factor <= 1) return null;
  return untrusted(
    `the update was to count for ${factor} of itself, and the task promised at least ${leastFactor}, and at most 1`,
  );
}

function untrusted(text: string): GivenBack {
  return { code: "untrusted", text };
}

/** Return why the device cannot mask its update as the task asks, or why that would hide nothing; null if it can, or there
 * is nothing to mask. */
export function unknownMasking(task: Task): string | null {
  const { secure } = task;
  if (secure === null) return null;
  const masked = "the task asks for a masked update";
  if (secure.mode !== "helper") return `${masked} in the mode "${secure.mode}"; this device knows helper`;
  if (secure.helper === null) return `${masked} in the mode helper, and names no helper's key`;
  if (secure.noise !== null) return `${masked} with noise below the mask, which this device cannot add`;
  if (task.local_noise !== null) {
    return `${masked} with noise before it (\`local_noise\`): noise has no largest element, and a masked one has`;
  }
  if (task.clip === null) return `${masked}, and does not bound it (\`clip\`): its numbers need a largest one`;
  if (KEEPING.includes(task.algorithm)) {
    return `${masked}, and to train with ${task.algorithm}, which keeps or sends what the mask does not hide`;
  }
  const other = Object.keys(task.parts).find((name) => name !== "update");
  if (other !== undefined) return `${masked}, and for the part ${other}, which the mask does not hide`;
  const expected = maskedEncoding(secure.bits);
  if (task.parts.update !== expected) {
    return `${masked} of ${secure.bits} bits, and for it as ${task.parts.update}; expected ${expected}`;
  }
  const most = mostUpdates(secure.bits);
  if (secure.minimum > most) {
    return (
      `${masked} of ${secure.bits} bits, of which ${most} can be added modulo 2^${modulusBits(secure.bits)}, for a sum of at least ` +
      `${secure.minimum}`
    );
  }
  return null;
}

/** Return what the coordinator is told of a task that failed. text: the reason, for the device's owner. */
export function toldOfFailure(task: Task | Question | null, code: string, text: string): string {
  const masked = task?.type === "task" && task.secure !== null;
  return masked && TELL_OF_DATA.includes(code) ? NOT_TOLD : text;
}
