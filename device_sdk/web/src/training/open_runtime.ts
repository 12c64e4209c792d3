/** A bundle by itself, without a coordinator: to train, to measure and to use its model. */

import { BundleError } from "../protocol/errors.ts";
import { INFER, MAX_MANIFEST_BYTES, type Manifest, PARAMETERS, readManifest } from "../protocol/manifest.ts";
import type { Evaluation } from "../protocol/messages.ts";
import { sha256 } from "../protocol/sha256.ts";
import { type RuntimeOptions, startEngine } from "../runtimes/choose.ts";
import type { Column } from "../runtimes/columns.ts";
import type { Engine } from "../runtimes/engine.ts";
import { type Bundle, openFiles, type ReadFile, readSafetensors } from "./bundle.ts";
import { type Columns, FittedData } from "./data.ts";
import { TrainingError } from "./errors.ts";
import { Predictor } from "./prediction.ts";
import type { Loading, Runtime } from "./runtime.ts";
import { checkHyper, evaluateData } from "./train.ts";

export interface OpenOptions extends RuntimeOptions {
  /** Loaded in place of the bundle's initial parameters: shape (P,) or (localSize,). */
  readonly model?: Float32Array;
}

/**
 * Open a bundle for training and for use. Its first model is the bundle's initial one.
 *
 * bundle: the address of its folder, from which files are fetched; or a function that returns the bytes of a file by its
 * path, such as `manifest.json`. It trains with one thread of the processor unless `runtime` says another. Rejects with
 * BundleError (a file is damaged or not there), TrainingError (out of memory, a vector of another length), and with Error
 * where what computes cannot be loaded.
 */
export async function openRuntime(bundle: string | URL | ReadFile, options: OpenOptions = {}): Promise<OpenedRuntime> {
  const read = typeof bundle === "function" ? bundle : fetching(bundle);
  const content = await read("manifest.json");
  if (content.length > MAX_MANIFEST_BYTES) throw new BundleError("too-large", "manifest.json is larger than 16 MiB");
  const manifest = readManifest(content);
  const checked: ReadFile = async (path) => {
    const entry = manifest.files[path]!;
    const content = await read(path);
    if (content.length === entry.size && sha256(content) === entry.sha256) return content;
    throw new BundleError("wrong-hash", `${path} is not the file that the manifest names: its SHA-256 is another`);
  };
  const { runtime = "wasm", runtimeFiles, model } = options;
  const engine = await startEngine(runtime, runtimeFiles);
  try {
    const opened = await openFiles(sha256(content), manifest, checked, engine);
    const local = new Float32Array(manifest.localSize);
    if (model === undefined || model.length < manifest.localSize) {
      readSafetensors(await checked(PARAMETERS), manifest.parameters, local, PARAMETERS);
    }
    await opened.runtime.load(local, { state: opened.state });
    const made = new OpenedRuntime(opened, checked, engine);
    if (model !== undefined) await made.load(model);
    return made;
  } catch (error) {
    engine.close();
    throw error;
  }
}

/** A bundle's model in training. Calls follow one after the other: each waits for the one before. */
export class OpenedRuntime {
  readonly manifest: Manifest;
  readonly #runtime: Runtime;
  readonly #read: ReadFile;
  readonly #engine: Engine;
  /** Has the parameters as they are now; null: it is made when it is wanted. */
  #predictor: Predictor | null = null;
  #turn: Promise<unknown> = Promise.resolve();

  /** Use `openRuntime`. */
  constructor({ manifest, runtime }: Bundle, read: ReadFile, engine: Engine) {
    this.manifest = manifest;
    this.#runtime = runtime;
    this.#read = read;
    this.#engine = engine;
  }

  /** Mean metrics of the last step's batch, measured before its update. */
  get metrics(): Readonly<Record<string, number>> {
    return this.#runtime.metrics;
  }

  /**
   * Do one optimizer step. Returns the batch's mean loss, before the update and without the proximal penalty.
   *
   * batch: arrays by the names of the manifest's batch. hyper: such as `{ lr: 0.1 }`; what is left out takes the manifest's
   * default. seed: what a random bundle (dropout) draws from, 0 to 2^53 - 1; give each step another. Rejects with
   * DataError, TrainingError; then nothing has changed.
   */
  step(batch: Columns, hyper: Readonly<Record<string, number>> = {}, { seed = 0 } = {}): Promise<number> {
    return this.#inTurn(async () => {
      if (!Number.isSafeInteger(seed) || seed < 0) {
        throw new TrainingError(
          "runtime-error",
          `the seed ${seed} was given; expected a whole number from 0 to 2^53 - 1`,
        );
      }
      const values = checkHyper(hyper, this.manifest.hyper);
      const [fitted] = new FittedData(batch, this.manifest.batch).batches(0, null);
      const loss = await this.#runtime.step(fitted!, seed, values);
      await this.#changed();
      return loss;
    });
  }

  /** Return the number of examples, and the sums of loss and metrics over them. Rejects with DataError, TrainingError. */
  evaluate(data: Columns): Promise<Evaluation> {
    return this.#inTurn(() => {
      const fitted = new FittedData(data, this.manifest.batch);
      return evaluateData(this.#runtime, fitted, { batchSize: 0, onBatch: () => {} });
    });
  }

  /** Return the model's outputs for these examples, by name, such as `{ output: { values, shape: [20, 10] } }`. Arrays that
   * the model does not read, such as labels, may be left out. Rejects with DataError, TrainingError. */
  predict(data: Columns): Promise<Record<string, Column>> {
    return this.#inTurn(async () => {
      const local = this.#predictor === null ? await this.#runtime.local() : null;
      if (local !== null) {
        this.#predictor = await Predictor.open(this.manifest, await this.#read(INFER), local, this.#engine);
      }
      return this.#predictor!.predict(data);
    });
  }

  /** Return a copy of the travelling parameters: shape (P,), in manifest order. */
  parameters(): Promise<Float32Array> {
    return this.#inTurn(() => this.#runtime.parameters());
  }

  /** Return a copy of the whole model, the personal parameters last: shape (localSize,). */
  local(): Promise<Float32Array> {
    return this.#inTurn(() => this.#runtime.local());
  }

  /** Copy a model in, for training to begin from: shape (P,), and the personal parameters stay as they are; or shape
   * (localSize,). The step's state begins again. Rejects with TrainingError. */
  load(vector: Float32Array, loading: Loading = {}): Promise<void> {
    return this.#inTurn(async () => {
      const { size, localSize } = this.manifest;
      if (vector.length !== size && vector.length !== localSize) {
        const expected = [...new Set([size, localSize])].join(" or ");
        throw new TrainingError(
          "runtime-error",
          `a vector of ${vector.length} elements was given; expected ${expected}`,
        );
      }
      const local = await this.#runtime.local();
      local.set(vector);
      await this.#runtime.load(local, loading);
      await this.#changed();
    });
  }

  /** Give all memory back. */
  close(): Promise<void> {
    return this.#inTurn(async () => {
      await this.#changed();
      await this.#runtime.close();
      this.#engine.close();
    });
  }

  #inTurn<T>(act: () => Promise<T>): Promise<T> {
    const done = this.#turn.then(act, act);
    this.#turn = done.catch(() => {});
    return done;
  }

  /** The parameters are others than those in the model that predicts. */
  async #changed(): Promise<void> {
    const predictor = this.#predictor;
    this.#predictor = null;
    await predictor?.close();
  }
}

function fetching(folder: string | URL): ReadFile {
  const base = String(folder).replace(/\/*$/, "/");
  return async (path) => {
    const address = base + path;
    const answer = await fetch(address);
    if (!answer.ok)
      throw new BundleError("unknown-content", `${address} of the bundle cannot be had: ${answer.status}`);
    return new Uint8Array(await answer.arrayBuffer());
  };
}
