/**
 * Ditto and FedRep: what is the device's own is trained in passes by itself, beside what travels.
 *
 * Steps, epochs and loss of the result are those of the passes that make the update. A time budget is shared in
 * proportion to the passes; each of the two parts does at least one step.
 */

import { type Hooks, type Settings, seedPlus, type TrainingResult } from "./train.ts";
import { load, type Outcome, trainLoaded, type Work } from "./work.ts";

/** What the personal passes add to the task's seed, modulo 2^53. */
export const PERSONAL_SEED = 2 ** 52;

/**
 * Train the round's model as plain training does, then the device's personal model, which is pulled towards it.
 *
 * Li et al. 2021, "Ditto", arXiv 2012.04221, algorithm 1: v <- v - lr (grad F(v) + mu (v - x)), where x is the round's
 * model. mu is 0 in the training of the round's model. v begins as the model of the device's first round.
 */
export async function ditto(work: Work): Promise<Outcome> {
  const { settings, model, bundle } = work;
  await load(work);
  const hyper = { ...settings.hyper, mu: 0 };
  const shared = await trainLoaded(work, { hyper, timeBudget: shareOfTime(work, settings.epochs) });
  const first = work.personal === null;
  await bundle.runtime.load(work.personal ?? model, { anchor: model });
  const own = await trainPersonal(work, {
    evaluate: settings.evaluate && !first,
    timeBudget: timeLeft(work, shared),
  });
  const result = together(shared, own);
  // The first personal model is the round's, and has been measured as such.
  const personalEvaluation = first ? shared.evaluation : own.evaluation;
  const personal = await bundle.runtime.parameters();
  return { result, parts: { update: result.update }, personal, personalEvaluation };
}

/**
 * Train the personal parameters with the others frozen, then the others with the personal ones frozen.
 *
 * Collins et al. 2021, "Exploiting Shared Representations for Personalized Federated Learning", arXiv 2102.07078,
 * algorithm 1. After each step the frozen rows, statistics included, are overwritten with what they were.
 */
export async function fedrep(work: Work): Promise<Outcome> {
  const { bundle } = work;
  const { size } = bundle.manifest;
  await load(work);
  const body = { afterStep: await putBack(work, 0, size) };
  const own = await trainPersonal(work, { timeBudget: shareOfTime(work, work.personalEpochs) }, body);
  await bundle.runtime.load(await bundle.runtime.local());
  const changes = { evaluate: false, timeBudget: timeLeft(work, own) };
  const shared = await trainLoaded(work, changes, { afterStep: await putBack(work, size, bundle.manifest.localSize) });
  const result = { ...together(shared, own), evaluation: own.evaluation };
  return { result, parts: { update: result.update } };
}

/** Do the personal passes with the loaded model. */
function trainPersonal(work: Work, changes: Partial<Settings>, hooks?: Hooks): Promise<TrainingResult> {
  const seed = seedPlus(work.settings.seed, PERSONAL_SEED);
  return trainLoaded(work, { epochs: work.personalEpochs, seed, ...changes }, hooks);
}

function together(shared: TrainingResult, own: TrainingResult): TrainingResult {
  const milliseconds = shared.milliseconds + own.milliseconds;
  return { ...shared, complete: shared.complete && own.complete, milliseconds };
}

/** Return the part of the time budget for this many passes. */
function shareOfTime({ settings, personalEpochs }: Work, epochs: number): number {
  return (settings.timeBudget * epochs) / (settings.epochs + personalEpochs);
}

/** Return what the first part of the training left of the time budget: enough for one step. */
function timeLeft({ settings }: Work, first: TrainingResult): number {
  return Math.max(settings.timeBudget - first.milliseconds, Number.MIN_VALUE);
}

/** Return a function that gives these elements of the local model the values that they have now. */
async function putBack({ bundle, model }: Work, begin: number, end: number): Promise<() => Promise<void>> {
  const { runtime } = bundle;
  const values = (await runtime.local()).subarray(begin, end);
  return async () => {
    const whole = await runtime.local();
    whole.set(values, begin);
    await runtime.load(whole, { anchor: model, state: await runtime.state() });
  };
}
