/**
 * What a device does by each algorithm (PROTOCOL.md, "Algorithms"): training, and what goes with it.
 *
 * Vectors have the P elements that travel, in the manifest's order. In rows that are buffers, all are 0 except the model:
 * what training left in these rows is reported as values, in the part `buffers`.
 */

import { findEncoding } from "../protocol/encodings.ts";
import { checkFinite } from "../protocol/formats.ts";
import { type LocalStep, type Manifest, withoutBuffers } from "../protocol/manifest.ts";
import type { Task } from "../protocol/messages.ts";
import { TrainingError } from "./errors.ts";
import { keptStateSize } from "./kept_state.ts";
import { ditto, fedrep } from "./personal.ts";
import { checkHyper, EVALUATION_BATCH, seedPlus, type TrainingResult } from "./train.ts";
import { apfl, innerSteps, pfedme } from "./two_models.ts";
import { load, type Outcome, trainLoaded, type Work } from "./work.ts";

/** An algorithm, and what it needs of the bundle. */
interface Algorithm {
  readonly run: (work: Work) => Promise<Outcome>;
  /** Names of its tied vectors. */
  readonly tied?: readonly string[];
  /** Tied vector that changes by a multiple of the update -> that factor, from the values of the hyper-parameters. */
  readonly perUpdate?: Readonly<Record<string, (hyper: Readonly<Record<string, number>>) => number>>;
  readonly optimizer?: LocalStep["optimizer"];
  readonly switches?: readonly (keyof LocalStep)[];
  readonly without?: readonly (keyof LocalStep)[];
  /** `parameters`: the bundle has personal ones. `model`: a whole model; nothing else is kept from task to task. */
  readonly personal?: "parameters" | "model";
  /** What it keeps with a whole model: so many vectors of P elements, the model first, and so many numbers. */
  readonly keeps?: readonly [number, number];
  /** Its own hyper-parameters, which a task has beside those of the bundle's step. */
  readonly hyper?: readonly string[];
  /** Steps of the runtime for each batch, where they are not 1. */
  readonly turns?: (hyper: Readonly<Record<string, number>>) => number;
}

export const ALGORITHMS: Readonly<Record<string, Algorithm>> = {
  plain: { run: plain },
  scaffold: { run: scaffold, tied: ["control"], optimizer: "sgd", switches: ["correction"] },
  "scaffold-gradient": { run: scaffoldGradient, tied: ["control"], optimizer: "sgd", switches: ["correction"] },
  feddyn: { run: feddyn, tied: ["dual"], perUpdate: { dual: dualPerUpdate }, switches: ["correction", "proximal"] },
  ditto: { run: ditto, switches: ["proximal"], personal: "model" },
  fedrep: { run: fedrep, without: ["clip", "contrastive"], personal: "parameters" },
  pfedme: {
    run: pfedme,
    switches: ["proximal"],
    personal: "model",
    hyper: ["inner_steps", "outer_lr"],
    turns: innerSteps,
  },
  apfl: {
    run: apfl,
    optimizer: "sgd",
    personal: "model",
    keeps: [2, 1],
    hyper: ["alpha", "adapt_alpha"],
    turns: () => 2,
  },
};

/** Return how many float32 elements a task's algorithm with a personal model keeps; 0 for the others. */
export function personalSize({ algorithm }: Task, { size }: Manifest): number {
  const { personal, keeps: [vectors, numbers] = [1, 0] } = ALGORITHMS[algorithm]!;
  return personal === "model" ? vectors * size + numbers : 0;
}

/** Return how many steps of the runtime a task makes, given the batches of a pass, and how many of them for each
 * batch. Throws TrainingError. */
export function stepsOf(task: Task, batches: number): { steps: number; turns: number } {
  const { personal, turns } = ALGORITHMS[task.algorithm]!;
  const each = turns?.(task.hyper) ?? 1;
  const apart = personal === undefined || turns !== undefined ? 0 : (task.personal_epochs ?? task.epochs);
  return { steps: each * (task.epochs + apart) * batches, turns: each };
}

/** Return the values of a task's hyper-parameters: of the bundle's step, and of the algorithm itself. Throws
 * TrainingError. */
export function hyperOf(
  task: Task,
  manifest: Manifest,
): { hyper: Record<string, number>; numbers: Record<string, number> } {
  const { hyper: own = [] } = ALGORITHMS[task.algorithm]!;
  const given = Object.entries(task.hyper);
  const missing = own.filter((name) => !(name in task.hyper));
  if (missing.length > 0) {
    const text = `the algorithm ${task.algorithm} needs the hyper-parameters ${missing.join(", ")} too`;
    throw new TrainingError("runtime-error", text);
  }
  return {
    hyper: checkHyper(Object.fromEntries(given.filter(([name]) => !own.includes(name))), manifest.hyper),
    numbers: Object.fromEntries(given.filter(([name]) => own.includes(name))),
  };
}

/** Learning rate of the step that measures a gradient, (x - y) / lr: the larger, the smaller is the rounding of x beside
 * the gradient; a power of two adds no rounding of its own. */
const GRADIENT_LR = 1024;

/** Do a task. Rejects with TrainingError, StoppedError. */
export async function runAlgorithm(name: string, work: Work): Promise<Outcome> {
  checkStep(name, work.bundle.manifest);
  const trained = await ALGORITHMS[name]!.run(work);
  const { buffers } = trained.result;
  const outcome = buffers.length > 0 ? { ...trained, parts: { ...trained.parts, buffers } } : trained;
  for (const [what, vector] of [...Object.entries(outcome.parts), ...Object.entries(outcome.tied ?? {})]) {
    try {
      checkFinite(vector);
    } catch (error) {
      const text = `the ${what} after training is not finite: ${(error as Error).message}; a smaller lr may help`;
      throw new TrainingError("diverged", text);
    }
  }
  return outcome;
}

/** Throw TrainingError (unsupported) unless the bundle's step is made for the algorithm. */
export function checkStep(name: string, manifest: Manifest): void {
  const { optimizer, switches = [], without = [], personal } = ALGORITHMS[name]!;
  const wrong = [
    ...(optimizer === undefined || optimizer === manifest.step.optimizer ? [] : [`the optimizer ${optimizer}`]),
    ...switches.filter((one) => !manifest.step[one]).map((one) => `${one}=True`),
    ...without.filter((one) => manifest.step[one]).map((one) => `${one}=False`),
    ...(optimizer !== undefined && manifest.compute !== undefined ? ["compute in float32"] : []),
    ...(personal === "parameters" && manifest.localSize === manifest.size ? ["personal parameters"] : []),
    ...(personal === "model" && keptStateSize(manifest) > 0 ? ["nothing that devices keep from task to task"] : []),
  ];
  if (wrong.length > 0) {
    const text = `the algorithm ${name} needs a bundle with ${wrong.join(" and ")}; bundle ${manifest.name} is another`;
    throw new TrainingError("unsupported", text);
  }
}

/** Train, and report the update (McMahan et al. 2017, arXiv 1602.05629, algorithm 1, ClientUpdate). */
async function plain(work: Work): Promise<Outcome> {
  await load(work);
  const result = await trainLoaded(work);
  return { result, parts: { update: result.update } };
}

/**
 * Train with c - c_k added to each gradient; c_k becomes the mean of the steps' gradients (option II).
 *
 * Karimireddy et al. 2020, "SCAFFOLD", arXiv 1910.06378, algorithm 1: c_k+ = c_k - c + (x - y) / (K lr).
 * With a schedule K lr is the sum of the steps' learning rates.
 */
async function scaffold(work: Work): Promise<Outcome> {
  const { lr = 0 } = work.settings.hyper;
  if (!(lr > 0)) throw new TrainingError("runtime-error", `the hyper-parameter lr is ${lr}; scaffold divides by it`);
  await load(work, correctionOf(work));
  const result = await trainLoaded(work);
  const server = work.vectors.control!;
  const rates = Math.fround(result.factors * lr);
  return withControl(
    work,
    result,
    server.map((c, place) => -c - Math.fround(result.update[place]! / rates)),
  );
}

/** Train as `scaffold` does; c_k becomes the gradient of all the device's data at the round's model (option I). */
async function scaffoldGradient(work: Work): Promise<Outcome> {
  const own = tiedVector(work, "control");
  const correction = correctionOf(work);
  let gradient = own;
  const beforeSteps = async (): Promise<void> => {
    gradient = await gradientOf(work);
    await load(work, correction);
  };
  await load(work, correction);
  const result = await trainLoaded(work, {}, { beforeSteps });
  return withControl(
    work,
    result,
    gradient.map((value, place) => value - own[place]!),
  );
}

/**
 * Train on loss - <lambda_k, w> + mu/2 ||w - x||^2; then lambda_k moves against the update.
 *
 * Acar et al. 2021, "Federated Learning Based on Dynamic Regularization", arXiv 2111.04263, algorithm 1 and equation 1.
 */
async function feddyn(work: Work): Promise<Outcome> {
  const own = tiedVector(work, "dual");
  await load(
    work,
    withoutBuffers(
      own.map((value) => -value),
      work.bundle.manifest.parameters,
    ),
  );
  const result = await trainLoaded(work);
  const factor = dualPerUpdate(work.settings.hyper);
  const change = withoutBuffers(
    result.update.map((value) => factor * value),
    work.bundle.manifest.parameters,
  );
  return { result, parts: { update: result.update }, tied: { dual: sum(own, change) } };
}

function dualPerUpdate(hyper: Readonly<Record<string, number>>): number {
  return -Math.fround(hyper.mu ?? 0);
}

/**
 * Return the algorithm's tied vectors as the coordinator counts the update: FedDyn's lambda_k must change by the update
 * that the coordinator's h changes by, which is what its bytes mean. content: the encoded update.
 */
export function tiedAsSent(
  task: Task,
  hyper: Readonly<Record<string, number>>,
  outcome: Outcome,
  content: Uint8Array,
  manifest: Manifest,
): Readonly<Record<string, Float32Array>> {
  const { perUpdate } = ALGORITHMS[task.algorithm]!;
  const encoding = task.parts.update!;
  const asItIs = encoding === "float32" && task.clip === null;
  if (perUpdate === undefined || asItIs) return outcome.tied ?? {};
  const update = outcome.parts.update!;
  const meant = findEncoding(encoding).decode(content, update.length);
  const trained = withoutBuffers(
    meant.map((value, place) => value - update[place]!),
    manifest.parameters,
  );
  const tied = { ...outcome.tied };
  for (const [vector, factor] of Object.entries(perUpdate)) {
    const by = factor(hyper);
    tied[vector] = sum(
      tied[vector]!,
      trained.map((value) => by * value),
    );
  }
  return tied;
}

/** Return what SCAFFOLD leaves, where c_k changes by `change`: the device keeps the sum of what it reports. */
function withControl(work: Work, result: TrainingResult, change: Float32Array): Outcome {
  const control = withoutBuffers(change, work.bundle.manifest.parameters);
  const tied = { control: sum(tiedVector(work, "control"), control) };
  return { result, parts: { update: result.update, control }, tied };
}

/** Return c - c_k. */
function correctionOf(work: Work): Float32Array {
  const own = tiedVector(work, "control");
  return withoutBuffers(
    work.vectors.control!.map((c, place) => c - own[place]!),
    work.bundle.manifest.parameters,
  );
}

/** Return the mean over all examples of the gradient at the round's model, as the step makes it without correction. */
async function gradientOf(work: Work): Promise<Float32Array> {
  const { settings, data, bundle } = work;
  const total = new Float32Array(work.model.length);
  const size = Math.min(settings.batchSize || EVALUATION_BATCH, EVALUATION_BATCH);
  let number = 0;
  for (const batch of data.batches(size, null)) {
    await load(work);
    await bundle.runtime.step(batch, seedPlus(settings.seed, number++), { ...settings.hyper, lr: GRADIENT_LR });
    const { anchor } = bundle.runtime;
    const parameters = await bundle.runtime.parameters();
    const weight = Math.fround(batch.examples / GRADIENT_LR);
    for (let index = 0; index < total.length; index++) {
      total[index]! += Math.fround(weight * Math.fround(anchor[index]! - parameters[index]!));
    }
    await settings.onBatch();
  }
  return total.map((value) => value / data.examples);
}

function tiedVector(work: Work, name: string): Float32Array {
  return work.tied[name] ?? new Float32Array(work.model.length);
}

function sum(a: Float32Array, b: Float32Array): Float32Array {
  return a.map((value, place) => value + b[place]!);
}
