/** What an algorithm is given, what it works with, and what it leaves. */

import type { Evaluation } from "../protocol/messages.ts";
import type { Bundle } from "./bundle.ts";
import type { FittedData } from "./data.ts";
import { loadModel } from "./kept_state.ts";
import { type Hooks, type Settings, type TrainingResult, train } from "./train.ts";

type Vectors = Readonly<Record<string, Float32Array>>;

/** All that an algorithm works with. */
export interface Work {
  readonly bundle: Bundle;
  readonly data: FittedData;
  readonly model: Float32Array;
  /** null at the device's first task of the bundle. */
  readonly keptState: Float32Array | null;
  /** The task's vectors beside the model. */
  readonly vectors: Vectors;
  /** The tied vectors that the task goes on from. Those that are absent are zeros. */
  readonly tied: Vectors;
  /** The device's personal model, and behind it what else its algorithm keeps. null at the first task of an algorithm
   * that has one. */
  readonly personal: Float32Array | null;
  readonly settings: Settings;
  /** The hyper-parameters of the algorithm itself. `settings` has those of the bundle's step. */
  readonly numbers: Readonly<Record<string, number>>;
  /** Passes in which the personal model or parameters are trained by themselves. */
  readonly personalEpochs: number;
}

/** What a task leaves. */
export interface Outcome {
  readonly result: TrainingResult;
  /** What is reported. */
  readonly parts: Vectors;
  readonly tied?: Vectors;
  readonly personal?: Float32Array;
  /** Sums of the personal model before the task. */
  readonly personalEvaluation?: Evaluation | null;
}

/** Load the round's model and the kept state. correction: added to each step's gradient. */
export function load(work: Work, correction?: Float32Array): Promise<void> {
  return loadModel(work.bundle, work.model, work.keptState, correction);
}

/** Train the loaded model with the task's settings. changes: what differs from these. */
export function trainLoaded(work: Work, changes: Partial<Settings> = {}, hooks: Hooks = {}): Promise<TrainingResult> {
  return train(work.bundle.runtime, work.data, { ...work.settings, ...changes }, hooks);
}
