/** Local training: passes of steps within a time budget. */

import { checkFinite } from "../protocol/formats.ts";
import { gatherBuffers, type Hyper, withoutBuffers } from "../protocol/manifest.ts";
import type { Evaluation, StepSchedule } from "../protocol/messages.ts";
import type { Batch, FittedData } from "./data.ts";
import { TrainingError } from "./errors.ts";
import { collectKeptState } from "./kept_state.ts";
import { factorAt } from "./learning_rates.ts";
import type { Runtime } from "./runtime.ts";

/** Seeds of a random step: 0 to 2^53 - 1. */
const SEEDS = 2 ** 53;
/** The largest magnitude of a number in the protocol. */
export const LARGEST = 1e30;
/** Most examples evaluated at a time: bounds memory, and changes no sum beyond rounding. */
export const EVALUATION_BATCH = 256;

export interface Settings {
  readonly hyper: Readonly<Record<string, number>>;
  readonly epochs: number;
  /** Examples in a step; 0: all examples in one step. */
  readonly batchSize: number;
  /** With the epoch's number, decides the order of the examples; step k (from 0) draws from seed + k mod 2^53. */
  readonly seed: number;
  /** Milliseconds. A step begins only if one of the mean duration so far would still fit; the first always begins. */
  readonly timeBudget: number;
  /** Measure the loaded model on all data first. */
  readonly evaluate: boolean;
  /** What the steps' learning rates are multiplied by. null: 1. */
  readonly schedule: StepSchedule | null;
  /** Called after each batch that was evaluated, and after each step with its loss. Throws StoppedError. */
  readonly onBatch: (loss?: number) => void | Promise<void>;
}

/** What training did. Where the time was over before the last epoch's end, `complete` is false. */
export interface TrainingResult {
  /** What travels of the parameters after training minus the anchor: shape (P,). 0 in the manifest's buffers. */
  readonly update: Float32Array;
  /** The values of the manifest's buffers after training, one row after the other. They were measured, not descended. */
  readonly buffers: Float32Array;
  readonly keptState: Float32Array;
  readonly steps: number;
  /** Sum of the schedule's factors of the steps; without a schedule the number of steps. */
  readonly factors: number;
  /** Passes that were done; a fraction where the last one was cut short. */
  readonly epochs: number;
  readonly complete: boolean;
  /** Mean over the examples of all steps; each loss is measured before its step. */
  readonly loss: number;
  readonly metrics: Record<string, number>;
  /** Wall-clock time, evaluation included. */
  readonly milliseconds: number;
  readonly evaluation: Evaluation | null;
}

/** Returns the batch's mean loss and metrics, before the step. */
export type Step = (
  batch: Batch,
  seed: number,
  hyper: Readonly<Record<string, number>>,
) => Promise<{ loss: number; metrics: Readonly<Record<string, number>> }>;

/** What may be done between the evaluation and the first step, and after each step. */
export interface Hooks {
  /** What is done with a batch, instead of a step of the runtime. It leaves the model that makes the update, and the
   * round's as its anchor. */
  readonly step?: Step;
  readonly beforeSteps?: () => Promise<void>;
  readonly afterStep?: () => Promise<void>;
}

/** Return (seed + more) modulo 2^53. The sum itself may be no number of JavaScript's. */
export function seedPlus(seed: number, more: number): number {
  return seed >= SEEDS - more ? seed - (SEEDS - more) : seed + more;
}

/** Train from the runtime's loaded model. Rejects with TrainingError, StoppedError. */
export async function train(
  runtime: Runtime,
  data: FittedData,
  settings: Settings,
  hooks: Hooks = {},
): Promise<TrainingResult> {
  const start = performance.now();
  const { epochs, batchSize, seed, timeBudget, hyper, schedule } = settings;
  if (!(timeBudget > 0)) {
    throw new TrainingError("out-of-time", `the time budget is ${timeBudget / 1000} s: nothing can be done in it`);
  }
  const evaluation = settings.evaluate ? await evaluateData(runtime, data, settings) : null;
  await hooks.beforeSteps?.();
  if (schedule !== null && hyper.lr === undefined) {
    const text = `the learning rate has a schedule, and the step of bundle ${runtime.manifest.name} has no lr`;
    throw new TrainingError("runtime-error", text);
  }
  const planned = epochs * Math.ceil(data.examples / (batchSize || data.examples));
  let steps = 0;
  let factors = 0;
  let seen = 0;
  let passes = 0;
  let lossSum = 0;
  let complete = true;
  const metricSums: Record<string, number> = {};
  const plainStep: Step = async (...given) => {
    const loss = await runtime.step(...given);
    return { loss, metrics: runtime.metrics };
  };
  const doStep = hooks.step ?? plainStep;
  const began = performance.now();
  passesOverData: for (; passes < epochs; passes++) {
    for (const batch of data.batches(batchSize, seed, passes)) {
      const now = performance.now();
      if (steps > 0 && now - start + (now - began) / steps > timeBudget) {
        complete = false;
        break passesOverData;
      }
      const factor = schedule === null ? 1 : factorAt(schedule, steps, planned);
      const values = schedule === null ? hyper : { ...hyper, lr: hyper.lr! * factor };
      const { loss, metrics } = await doStep(batch, seedPlus(seed, steps), values);
      steps += 1;
      factors += factor;
      seen += batch.examples;
      if (!(Math.abs(loss) <= LARGEST)) throw diverged(data, `step ${steps}'s loss is ${loss}: a smaller lr may help`);
      lossSum += loss * batch.examples;
      for (const [name, value] of Object.entries(metrics)) {
        metricSums[name] = (metricSums[name] ?? 0) + value * batch.examples;
      }
      await hooks.afterStep?.();
      await settings.onBatch(loss);
    }
  }
  const local = await runtime.local();
  const keptState = await collectKeptState(runtime, local);
  const update = local.subarray(0, runtime.manifest.size);
  const { parameters } = runtime.manifest;
  const buffers = gatherBuffers(update, parameters);
  for (let index = 0; index < update.length; index++) update[index]! -= runtime.anchor[index]!;
  withoutBuffers(update, parameters);
  for (const [what, vector] of [
    ["update", update],
    ["model's buffers", buffers],
    ["device's own part", keptState],
  ] as const) {
    try {
      checkFinite(vector);
    } catch (error) {
      throw diverged(data, `the ${what} after step ${steps} is not finite: ${(error as Error).message}`);
    }
  }
  return {
    update,
    buffers,
    keptState,
    steps,
    factors,
    epochs: complete ? epochs : passes + Math.min(1, (seen - passes * data.examples) / data.examples),
    complete,
    loss: lossSum / seen,
    metrics: Object.fromEntries(measured(metricSums).map(([name, value]) => [name, value / seen])),
    milliseconds: performance.now() - start,
    evaluation,
  };
}

/** Return the sums of the runtime's model over all data. Rejects with TrainingError (diverged), StoppedError. */
export async function evaluateData(
  runtime: Runtime,
  data: FittedData,
  { batchSize, onBatch }: Pick<Settings, "batchSize" | "onBatch">,
): Promise<Evaluation> {
  let examples = 0;
  let lossSum = 0;
  const metricSums = Object.fromEntries(runtime.manifest.metrics.map((name) => [name, 0]));
  for (const batch of data.batches(Math.min(batchSize || EVALUATION_BATCH, EVALUATION_BATCH), null)) {
    const part = await runtime.evaluate(batch);
    examples += part.examples;
    lossSum += part.loss_sum;
    for (const [name, value] of Object.entries(part.metric_sums)) metricSums[name]! += value;
    await onBatch();
  }
  if (!(Math.abs(lossSum) <= LARGEST)) {
    throw diverged(data, `before training, the model's summed loss on these data is ${lossSum}`);
  }
  return { examples, loss_sum: lossSum, metric_sums: Object.fromEntries(measured(metricSums)) };
}

/** Return the value of each hyper-parameter; the default where none is given. Throws TrainingError. */
export function checkHyper(given: Readonly<Record<string, number>>, rows: readonly Hyper[]): Record<string, number> {
  const names = rows.map((row) => row.name);
  const unknown = Object.keys(given).filter((name) => !names.includes(name));
  if (unknown.length > 0) {
    const text = `hyper-parameters ${unknown.join(", ")} are not the bundle's; it has ${names.join(", ")}`;
    throw new TrainingError("runtime-error", text);
  }
  const values = rows.map((row): [string, number] => {
    const value = given[row.name] ?? row.default;
    if (value === null) {
      const text = `the hyper-parameter ${row.name} was not given and has no default in the bundle`;
      throw new TrainingError("runtime-error", text);
    }
    return [row.name, value];
  });
  return Object.fromEntries(values);
}

/** Return the error of a training that diverged: the data's fault where they hold a value that is not finite. */
function diverged(data: FittedData, text: string): TrainingError {
  const nonfinite = data.firstNonfinite();
  return nonfinite === null
    ? new TrainingError("diverged", text)
    : new TrainingError("bad-data", `${nonfinite}. With it, ${text}`);
}

/** Return the metrics without those that these data do not define (0/0), which must not fail the training. */
function measured(metrics: Readonly<Record<string, number>>): [string, number][] {
  return Object.entries(metrics).filter(([, value]) => Math.abs(value) <= LARGEST);
}
