/**
 * Tasks with secure aggregation: what of one this SDK cannot do, and what the device's owner demands, whatever the
 * coordinator says.
 */

import type { Question, Task } from "../protocol/messages.ts";

/** The encoding of words to which a mask was added. */
export const MASKED = "masked";
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
  "the device masked an update of this task already: of two, whoever has both could tell what differs between them";

/** The demands of a device's owner. What is left out is not demanded. */
export interface SecureDemands {
  /** Do no task without secure aggregation, and answer no question, whose answer nothing hides. */
  readonly require?: boolean;
  /** The public key of the only helper that is trusted: 64 hexadecimal digits, as `fleetlearn-coordinator helper status`
   * prints it. Tasks for another helper are given back. */
  readonly helper?: string;
  /** The fewest devices whose updates may be added up: tasks with a smaller minimum are given back. */
  readonly minimum?: number;
}

/** Return the demands. Throws RangeError where one cannot be one. */
export function checkDemands(demands: SecureDemands): SecureDemands {
  const { helper, minimum } = demands;
  if (helper !== undefined && !/^[0-9a-f]{64}$/.test(helper)) {
    throw new RangeError(
      `the helper ${helper} was given; expected its public key, 64 hexadecimal digits, as ` +
        "`fleetlearn-coordinator helper status` prints it",
    );
  }
  if (minimum !== undefined && !(Number.isInteger(minimum) && minimum >= 2)) {
    throw new RangeError(`secure.minimum is ${minimum}; expected a whole number of devices, at least 2`);
  }
  return demands;
}

/** Return why the owner's demands forbid this, for people; null if they do not. */
export function refusal(demands: SecureDemands, task: Task | Question): string | null {
  const { require = false, helper, minimum } = demands;
  const secure = task.type === "task" ? task.secure : null;
  if (secure === null) {
    if (!require) return null;
    const lacking =
      task.type === "task"
        ? "the task does not mask the update (`secure`)"
        : `its answer to the question ${task.kind} would have no mask`;
    return `this device's owner lets it take part only in runs with secure aggregation (secure.require), and ${lacking}`;
  }
  if (helper !== undefined && secure.helper !== helper) {
    return `this device's owner trusts the helper ${helper} alone (secure.helper), and the task names ${secure.helper ?? "none"}`;
  }
  if (minimum !== undefined && secure.minimum < minimum) {
    return (
      `this device's owner lets no fewer than ${minimum} updates be added up (secure.minimum), and the task allows ` +
      `${secure.minimum}`
    );
  }
  return null;
}

/** Return why the update of a task with `secure` cannot be masked here, for people; null if it can, or is not to be. */
export function unmaskable(task: Task): string | null {
  const { secure } = task;
  if (secure === null) return null;
  const masked = "the task asks the device to mask its update";
  if (secure.mode !== "helper")
    return `${masked} together with other devices (${secure.mode}); this device cannot do that`;
  if (secure.noise !== null) return `${masked} with noise under the mask; this device cannot do that`;
  if (secure.helper === null) return `${masked}, and names no helper that the seed could be sealed for`;
  if (task.clip === null)
    return `${masked}, and does not bound the update (\`clip\`): no whole number holds one of any length`;
  if (KEEPING.includes(task.algorithm)) {
    return `${masked} and to train with ${task.algorithm}, which keeps or sends what the mask does not hide`;
  }
  const others = Object.entries(task.parts).filter(([name, encoding]) => name !== "update" || encoding !== MASKED);
  if (others.length > 0 || !("update" in task.parts)) {
    const listed = Object.entries(task.parts).map(([name, encoding]) => `${name} (${encoding})`);
    return `${masked}, and asks for the parts ${listed.join(", ")}; expected update (${MASKED}) alone`;
  }
  return null;
}

/** Return what the coordinator is told of a task that failed. text: the reason, for the device's owner. */
export function toldOfFailure(task: Task | Question | null, code: string, text: string): string {
  const masked = task?.type === "task" && task.secure !== null;
  return masked && TELL_OF_DATA.includes(code) ? NOT_TOLD : text;
}
