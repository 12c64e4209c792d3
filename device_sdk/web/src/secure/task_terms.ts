/**
 * What a device signs of its task. Device and coordinator make it from the same task (task_terms.py).
 *
 * The training is in it so that a coordinator cannot single one device out by its task: with a learning rate of 0 for all
 * the others, the sum of a round would be the one device's update.
 */

import type { StepSchedule, Task } from "../protocol/messages.ts";
import { sha256 } from "../protocol/sha256.ts";
import { lengthPrefixed, type MaskedUpdate, type MaskTerms } from "./about.ts";

const TRAINING = "fleetlearn.v1 training";
const encoder = new TextEncoder();

/** A task whose update is masked with a helper's help. */
export type MaskedTask = Task & { readonly secure: { readonly helper: string }; readonly clip: number };

/**
 * Return the name of what is trained, and how: SHA-256, in hexadecimal digits. All devices of a sum must have signed the
 * same.
 *
 * Of it are the fields of the task that decide what an update is; not of it are those that differ between devices (task,
 * seed, deadline), and the model, which `MaskedUpdate` has. Integers are decimal digits, other numbers the 8 bytes of an
 * IEEE 754 double, big-endian, null is empty.
 */
export function trainingDigest(task: MaskedTask): string {
  const { secure } = task;
  const hyper = Object.keys(task.hyper).sort();
  const parts = Object.keys(task.parts).sort();
  const fields = [
    encoder.encode(TRAINING),
    encoder.encode(task.algorithm),
    integer(task.epochs),
    integer(task.batch_size),
    integer(task.personal_epochs),
    double(task.clip),
    integer(secure.bits),
    integer(secure.most_weight),
    double(secure.least_factor),
    double(secure.noise),
    integer(hyper.length),
    ...hyper.flatMap((name) => [encoder.encode(name), double(task.hyper[name]!)]),
    integer(parts.length),
    ...parts.flatMap((name) => [encoder.encode(name), encoder.encode(task.parts[name])]),
    ...(task.schedule === null ? [] : scheduleFields(task.schedule)),
  ];
  return sha256(lengthPrefixed(fields));
}

/** Return what the task's update has in common with those that it is added to. size: words of the update as it is masked,
 * the weight included. */
export function termsOf(task: MaskedTask, size: number): MaskTerms {
  return {
    helper: task.secure.helper,
    run: runOf(task.task),
    bundle: task.bundle,
    size,
    minimum: task.secure.minimum,
    training: trainingDigest(task),
    oneModel: task.secure.least_factor === null,
  };
}

/** Return which update it is. device: who trains. */
export function updateOf(task: Task, device: string): MaskedUpdate {
  const model = task.vectors.find(({ name }) => name === "model")!.sha256;
  return { device, task: task.task, round: task.round, model };
}

/** Return what names the run that a task belongs to: what stands before the first `-` of the task's name. */
export function runOf(task: string): string {
  return task.split("-", 1)[0]!;
}

function scheduleFields(schedule: StepSchedule): Uint8Array[] {
  return [
    encoder.encode(schedule.kind),
    integer(schedule.warm_up),
    double(schedule.start),
    integer(schedule.every),
    double(schedule.factor),
    integer(schedule.steps),
    double(schedule.least),
    integer(schedule.first),
  ];
}

function integer(value: number | null): Uint8Array {
  return encoder.encode(value === null ? "" : String(value));
}

function double(value: number | null): Uint8Array {
  if (value === null) return new Uint8Array(0);
  const content = new Uint8Array(8);
  new DataView(content.buffer).setFloat64(0, value);
  return content;
}
