/**
 * pFedMe and APFL: two models that are trained in the same steps, the one that makes the update and the device's own.
 *
 * The step of each batch is several steps of the runtime. `personal.ts` has the algorithms whose two parts are trained
 * one after the other.
 */

import { bufferRows, elementsOf, type Manifest, type Parameter, withoutBuffers } from "../protocol/manifest.ts";
import type { Evaluation } from "../protocol/messages.ts";
import { TrainingError } from "./errors.ts";
import { PERSONAL_SEED } from "./personal.ts";
import { evaluateData, type Step, seedPlus } from "./train.ts";
import { load, type Outcome, trainLoaded, type Work } from "./work.ts";

const INNER_SEEDS = 2 ** 32;
const MOST_INNER_STEPS = 10 ** 4;

/** Return pFedMe's K, the steps on each batch. Throws TrainingError. */
export function innerSteps({ inner_steps: steps = 0 }: Readonly<Record<string, number>>): number {
  if (Number.isInteger(steps) && steps >= 1 && steps <= MOST_INNER_STEPS) return steps;
  const expected = `expected a whole number from 1 to ${MOST_INNER_STEPS}`;
  throw new TrainingError("runtime-error", `the hyper-parameter inner_steps is ${steps}; ${expected}`);
}

/**
 * Train a personal model theta with a pull towards the local model w, which follows it slowly. The update is w's.
 *
 * T. Dinh, Tran and Nguyen 2020, "Personalized Federated Learning with Moreau Envelopes", arXiv 2006.08848, algorithm 1.
 * For each batch, theta makes K steps of the bundle's optimizer with a pull towards w, from where the batch before left
 * it; then w <- w - eta lambda (w - theta). lambda is mu, K is inner_steps, eta is outer_lr.
 */
export async function pfedme(work: Work): Promise<Outcome> {
  const { model, numbers, settings, bundle } = work;
  const { runtime, manifest } = bundle;
  const turns = innerSteps(numbers);
  const pull = Math.fround(numbers.outer_lr! * settings.hyper.mu!);
  let theta: Float32Array | null = null;
  const step: Step = async (batch, seed, hyper) => {
    const local = await runtime.parameters();
    await runtime.load(theta ?? local, { anchor: local, state: await runtime.state() });
    const loss = await runtime.step(batch, seed, hyper);
    const { metrics } = runtime;
    for (let turn = 1; turn < turns; turn++) {
      await runtime.step(batch, seedPlus(seed, turn * INNER_SEEDS), hyper);
    }
    const found = await runtime.parameters();
    theta = found;
    const moved = local.map((value, place) => value - Math.fround(pull * Math.fround(value - found[place]!)));
    // Buffers are measured, not descended: both models have the newest.
    copyBuffers(found, moved, manifest.parameters);
    await runtime.load(moved, { anchor: model, state: await runtime.state() });
    return { loss, metrics };
  };
  const own = work.personal?.subarray(0, manifest.size) ?? null;
  const { result, personalEvaluation } = await trainBoth(work, step, own);
  return { result, parts: { update: result.update }, personal: theta!, personalEvaluation };
}

/**
 * Train the round's model w as plain training does, and beside it the device's own v by the gradient of their mixture
 * alpha v + (1 - alpha) w, which is the personal model.
 *
 * Deng, Kamani and Mahdavi 2020, "Adaptive Personalized Federated Learning", arXiv 2003.13461, algorithm 1 and equation
 * 10: v <- v - lr alpha g and alpha <- alpha - adapt_alpha lr <v - w, g>, with g the gradient at the mixture.
 */
export async function apfl(work: Work): Promise<Outcome> {
  const { model, numbers, bundle, personal } = work;
  const { runtime, manifest } = bundle;
  const { alpha: first = -1, adapt_alpha: adapt = -1 } = numbers;
  if (!(first >= 0 && first <= 1 && adapt >= 0)) {
    const text = `the hyper-parameters alpha and adapt_alpha are ${first} and ${adapt}; expected 0 to 1, and 0 or more`;
    throw new TrainingError("runtime-error", text);
  }
  let { own, alpha } = ownOf(personal, model, first);
  const before = personal === null ? null : mixed(own, model, alpha, manifest);
  const step: Step = async (batch, seed, hyper) => {
    const local = await runtime.parameters();
    const mixture = mixed(own, local, alpha, manifest);
    await runtime.load(mixture, { anchor: model });
    await runtime.step(batch, seedPlus(seed, PERSONAL_SEED), hyper);
    const after = await runtime.parameters();
    // -lr g: the optimizer is plain gradient descent
    const moved = withoutBuffers(
      after.map((value, place) => value - mixture[place]!),
      manifest.parameters,
    );
    let rise = 0;
    for (let place = 0; place < moved.length; place++) rise += (own[place]! - local[place]!) * moved[place]!;
    own = own.map((value, place) => value + Math.fround(alpha * moved[place]!));
    copyBuffers(after, own, manifest.parameters);
    alpha = Math.fround(Math.min(Math.max(alpha + adapt * rise, 0), 1));
    await runtime.load(local, { anchor: model });
    const loss = await runtime.step(batch, seed, hyper);
    return { loss, metrics: runtime.metrics };
  };
  const { result, personalEvaluation } = await trainBoth(work, step, before);
  const kept = new Float32Array(2 * manifest.size + 1);
  kept.set(mixed(own, await runtime.parameters(), alpha, manifest));
  kept.set(own, manifest.size);
  kept[2 * manifest.size] = alpha;
  return { result, parts: { update: result.update }, personal: kept, personalEvaluation };
}

/** Return v and alpha from the vector that a device keeps. alpha: the value to begin with. */
function ownOf(
  personal: Float32Array | null,
  model: Float32Array,
  alpha: number,
): { own: Float32Array; alpha: number } {
  const size = model.length;
  if (personal?.length !== 2 * size + 1) {
    return { own: (personal ?? model).slice(0, size), alpha: Math.fround(alpha) };
  }
  return { own: personal.slice(size, 2 * size), alpha: personal[2 * size]! };
}

/** Return alpha v + (1 - alpha) w, with the buffers of v: those are measured on the mixture. */
function mixed(own: Float32Array, local: Float32Array, alpha: number, { parameters }: Manifest): Float32Array {
  const rest = Math.fround(1 - alpha);
  const mixture = own.map((value, place) => Math.fround(alpha * value) + Math.fround(rest * local[place]!));
  copyBuffers(own, mixture, parameters);
  return mixture;
}

function copyBuffers(from: Float32Array, into: Float32Array, parameters: readonly Parameter[]): void {
  for (const row of bufferRows(parameters)) {
    const end = row.offset + elementsOf(row);
    into.set(from.subarray(row.offset, end), row.offset);
  }
}

/** Train both models, and measure the personal one first, if the device has one. */
async function trainBoth(
  work: Work,
  step: Step,
  personal: Float32Array | null,
): Promise<Pick<Outcome, "result"> & { personalEvaluation: Evaluation | null }> {
  const { runtime } = work.bundle;
  let measured: Evaluation | null = null;
  const beforeSteps = async (): Promise<void> => {
    if (personal === null || !work.settings.evaluate) return;
    await runtime.load(personal, { anchor: work.model });
    measured = await evaluateData(runtime, work.data, work.settings);
    await load(work);
  };
  await load(work);
  const result = await trainLoaded(work, {}, { step, beforeSteps });
  return { result, personalEvaluation: personal === null ? result.evaluation : measured };
}
