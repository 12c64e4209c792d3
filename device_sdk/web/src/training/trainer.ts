/** Carries out a task's training or evaluation, from the contents in the store to a report. */

import type { Progress } from "../life/state.ts";
import { crc32 } from "../protocol/crc32.ts";
import { findEncoding, leavesResidual } from "../protocol/encodings.ts";
import { BundleError, ProtocolError } from "../protocol/errors.ts";
import { type FitAnswer, vectorsOf } from "../protocol/exchanges.ts";
import { bufferRows, type Manifest } from "../protocol/manifest.ts";
import type { Evaluation, Question, Reply, Report, Task, VectorReference } from "../protocol/messages.ts";
import { chooseRuntime, type RuntimeOptions, rememberRuntime, startEngine, type Trial } from "../runtimes/choose.ts";
import type { Engine, EngineName } from "../runtimes/engine.ts";
import { StoppedError } from "../runtimes/errors.ts";
import { shareOf } from "../secure/fixed_point.ts";
import type { MaskedTask } from "../secure/task_terms.ts";
import { MASKED_ONCE } from "../session/secure_tasks.ts";
import type { Contents } from "../storage/contents.ts";
import type { FinishedUpdate, Outbox } from "../storage/outbox.ts";
import type { Store } from "../storage/store.ts";
import { ALGORITHMS, checkStep, hyperOf, personalSize, runAlgorithm, stepsOf, tiedAsSent } from "./algorithms.ts";
import { type Bundle, openBundle } from "./bundle.ts";
import { type Columns, FittedData } from "./data.ts";
import { TrainingError } from "./errors.ts";
import { keptStateSize, loadModel } from "./kept_state.ts";
import { CUT_SHORT, type Masker } from "./masker.ts";
import { encodeParts } from "./sent_parts.ts";
import { evaluateData, LARGEST, type TrainingResult } from "./train.ts";

/** The device gives a task back after this many processes died during its training. */
const MAX_STARTS = 3;
/** More than a report has, and than Chromium writes without a look at the quota (64 KiB). */
const REPORT_BYTES = 128 * 1024;
/** Milliseconds of training after which what else waits in this thread has a turn: messages, heartbeats. */
const TURN = 10;

/** Milliseconds that a task must have for the engines to be measured first. */
const ENOUGH_TO_MEASURE = 60_000;
/** Most examples in a step of that measurement. */
const TRIAL_BATCH = 32;

/** How a trainer finds the engine of a bundle. */
export interface Runtimes extends RuntimeOptions {
  /** Where what was measured is remembered. */
  readonly store: Store;
  readonly log: (text: string, level: "info" | "warning") => void;
}

export class Trainer {
  /** What trains, or trained last. */
  engine: EngineName = "wasm";
  /** Batches of the task that were evaluated, plus steps. */
  batches = 0;
  /** While it is true, training ends before its next batch. */
  halt = false;
  /** Of the task in training. null before its first step. */
  progress: Progress | null = null;
  /** Called now and then while a task is in training. */
  onProgress: () => void = () => {};
  readonly #contents: Contents;
  readonly #outbox: Outbox;
  readonly #columns: Columns;
  readonly #runtimes: Runtimes;
  readonly #masker: Masker;
  #opened: { bundle: Bundle; data: FittedData } | null = null;
  /** An engine that was started before there was a task, for the first bundle. */
  #spare: Engine | null = null;
  #preparing: Promise<void> | null = null;
  #turnBegan = 0;

  constructor(contents: Contents, outbox: Outbox, columns: Columns, runtimes: Runtimes, masker: Masker) {
    this.#contents = contents;
    this.#outbox = outbox;
    this.#columns = columns;
    this.#runtimes = runtimes;
    this.#masker = masker;
  }

  /** Whether what computes is started. */
  get ready(): boolean {
    return this.#spare !== null || this.#opened !== null;
  }

  /** Start what computes: a device that cannot must not take tasks. Rejects with an Error that says why; may be called
   * again. */
  prepare(): Promise<void> {
    const { runtime = "wasm", runtimeFiles } = this.#runtimes;
    this.#preparing ??= startEngine(runtime, runtimeFiles)
      .then((engine) => {
        this.#spare = engine;
      })
      .finally(() => {
        this.#preparing = null;
      });
    return this.#preparing;
  }

  /** Train for at most `seconds`, opening the bundle included. Rejects with TrainingError, StoppedError,
   * ProtocolError (also BundleError), StoreError. */
  train(task: Task, seconds: number): Promise<FinishedUpdate> {
    const end = performance.now() + 1000 * seconds;
    return this.#counted(task.task, () => this.#train(task, end));
  }

  /** Work out what is asked (`ANSWERS`). Rejects as `train` does. */
  answer(task: Question, seconds: number): Promise<Reply> {
    const begin = performance.now();
    return this.#counted(task.task, async () => {
      const content = await ANSWERS[task.kind]!(this, task, seconds);
      return { type: "reply", task: task.task, kind: task.kind, content, seconds: (performance.now() - begin) / 1000 };
    });
  }

  /** Return the question's model measured with the device's own parameters, if the bundle has any. */
  async evaluate({ bundle: hash, vectors }: Question, seconds: number): Promise<Evaluation> {
    const end = performance.now() + 1000 * seconds;
    const model = await this.#vector(vectors.find((vector) => vector.name === "model")!);
    const { bundle, data } = await this.#open(hash!, model.length, null);
    await this.#contents.setNewest({ bundle: hash!, vectors });
    return this.#measure(bundle, data, model, seconds, end);
  }

  /** Return how well each of the question's models fits the device's data, with the device's own parameters. */
  async fit(question: Question, seconds: number): Promise<FitAnswer> {
    const end = performance.now() + 1000 * seconds;
    let diverged: unknown;
    let examples = 0;
    const losses: number[] = [];
    for (const name of vectorsOf(question)) {
      const model = await this.#vector(question.vectors.find((vector) => vector.name === name)!);
      const { bundle, data } = await this.#open(question.bundle!, model.length, null);
      try {
        const found = await this.#measure(bundle, data, model, seconds, end);
        examples = found.examples;
        losses.push(found.loss_sum / found.examples);
      } catch (error) {
        if (!(error instanceof TrainingError && error.code === "diverged")) throw error;
        diverged = error;
        losses.push(LARGEST);
      }
    }
    if (examples === 0) throw diverged;
    return { examples, losses };
  }

  async #measure(
    bundle: Bundle,
    data: FittedData,
    model: Float32Array,
    seconds: number,
    end: number,
  ): Promise<Evaluation> {
    await loadModel(bundle, model, await this.#keptState(bundle));
    const onBatch = async (): Promise<void> => {
      await this.#countBatch();
      if (performance.now() > end) {
        throw new TrainingError("out-of-time", `the measurement took longer than the ${seconds} s that were left`);
      }
    };
    return evaluateData(bundle.runtime, data, { batchSize: 0, onBatch });
  }

  /** Count the task's start durably while `act` runs: it may kill the process. */
  async #counted<T>(task: string, act: () => Promise<T>): Promise<T> {
    this.batches = 0;
    this.halt = false;
    this.progress = null;
    this.#turnBegan = performance.now();
    const starts = await this.#outbox.starts(task);
    if (starts >= MAX_STARTS) {
      const text = `the task ended the page or process ${starts} times, most likely for lack of memory`;
      throw new TrainingError("killed", text);
    }
    await this.#outbox.setStarts(task, starts + 1);
    try {
      return await act();
    } catch (error) {
      if (error instanceof BundleError) {
        // Its files are checked again when they are needed next.
        await this.#close();
        this.#contents.recheck();
      } else if (error instanceof TrainingError && ["runtime-error", "out-of-memory"].includes(error.code)) {
        await this.#leaveEngine(error);
      }
      throw error;
    } finally {
      await this.#outbox.setStarts(null);
    }
  }

  async #train(task: Task, end: number): Promise<FinishedUpdate> {
    const masked = isMasked(task);
    if (masked) {
      if (await this.#outbox.wasMasked(task.task)) throw new TrainingError("unsupported", MASKED_ONCE);
      await this.#masker.prepare(task);
    }
    const vectors: Record<string, Float32Array> = {};
    for (const reference of task.vectors) vectors[reference.name] = await this.#vector(reference);
    const { model: given, ...others } = vectors;
    const model = given!;
    const { bundle, data } = await this.#open(task.bundle, model.length, { task, model, end });
    await this.#contents.setNewest(task);
    checkStep(task.algorithm, bundle.manifest); // before tied vectors are deleted
    checkParts(task, bundle.manifest);
    const algorithm = ALGORITHMS[task.algorithm]!;
    const { size } = bundle.manifest;
    const residual = leavesResidual(task.parts.update!);
    const keptElements = keptStateSize(bundle.manifest);
    const tiedVectors = (algorithm.tied ?? []).length + (residual ? 1 : 0);
    const ownElements = personalSize(task, bundle.manifest);
    const sentVectors = Object.keys(task.parts).length + (masked ? 1 : 0); // with a mask, in place of the one without
    await this.#outbox.tryRoom(4 * (size * (sentVectors + tiedVectors) + keptElements + ownElements) + REPORT_BYTES);
    const hasTied = residual || (algorithm.tied ?? []).length > 0;
    const tied = hasTied ? await this.#outbox.beginTied(task.bundle, task.kept, size) : {};
    const lostTied = (algorithm.tied ?? []).some((name) => task.kept !== null && tied[name] === undefined);
    const { steps, turns } = stepsOf(task, Math.ceil(data.examples / (task.batch_size || data.examples)));
    const personal = await this.#outbox.personal(task.bundle, ownElements > 0 ? size : 0);
    const { hyper, numbers } = hyperOf(task, bundle.manifest);
    const outcome = await runAlgorithm(task.algorithm, {
      bundle,
      data,
      model,
      keptState: await this.#keptState(bundle),
      vectors: others,
      tied,
      personal,
      settings: {
        hyper,
        epochs: task.epochs,
        batchSize: task.batch_size,
        seed: task.seed,
        timeBudget: end - performance.now(),
        schedule: task.schedule,
        evaluate: task.evaluate && !masked, // nothing that is measured is sent beside a masked update
        onBatch: (loss) => {
          if (loss !== undefined) this.progress = { step: (this.progress?.step ?? 0) + turns, steps, loss };
          return this.#countBatch();
        },
      },
      numbers,
      personalEpochs: task.personal_epochs ?? task.epochs,
    });
    if (masked && !outcome.result.complete) throw new TrainingError("out-of-time", CUT_SHORT);
    const asFloats = masked ? { ...task, parts: { update: "float32" } } : task;
    const { contents, left, clipped } = encodeParts(asFloats, outcome.parts, tied);
    const ownTied = tiedAsSent(task, hyper, outcome, contents.update!, bundle.manifest);
    const { result } = outcome;
    this.#tell(task, result);
    const kept = {
      bundle: task.bundle,
      keptState: result.keptState,
      tied: { ...ownTied, ...left },
      personal: outcome.personal ?? null,
    };
    if (masked) return { ...(await this.#masked(task, contents.update!, data.examples)), ...kept };
    const report: Report = {
      type: "report",
      task: task.task,
      round: task.round,
      parts: Object.entries(contents).map(([name, content]) => ({
        name,
        encoding: task.parts[name]!,
        size: content.length,
        crc32: crc32(content),
      })),
      examples: data.examples,
      steps: result.steps,
      epochs: result.epochs,
      complete: result.complete,
      loss: result.loss,
      metrics: result.metrics,
      seconds: result.milliseconds / 1000,
      evaluation: result.evaluation,
      personal: outcome.personalEvaluation ?? null,
      lost_tied: lostTied,
      clipped,
      sealed: null,
      signature: null,
    };
    return { result: report, contents: Object.values(contents), ...kept };
  }

  #tell(task: Task, { steps, epochs, complete, loss, milliseconds }: TrainingResult): void {
    const partial = complete ? "" : " (partial: the time is over)";
    const text = `trained ${steps} steps, ${epochs} epochs${partial}, loss ${loss}`;
    this.#runtimes.log(`task ${task.task}: ${text}, in ${(milliseconds / 1000).toFixed(2)} s`, "info");
  }

  /** Mask the clipped update, float32, at once, or leave that until its staleness is known. */
  async #masked(
    task: MaskedTask,
    content: Uint8Array,
    examples: number,
  ): Promise<Pick<FinishedUpdate, "result" | "contents" | "share">> {
    const share = shareOf(examples, task.secure.most_weight);
    if (task.secure.least_factor !== null) return { result: task, contents: [content], share };
    const masked = await this.#masker.mask(task, new Float32Array(content.buffer), share, 1);
    return { result: masked.report, contents: [masked.content] };
  }

  async #vector(reference: VectorReference): Promise<Float32Array> {
    const content = await this.#contents.vector(reference.sha256);
    const encoding = findEncoding(reference.encoding);
    encoding.check(content);
    return encoding.decode(content);
  }

  #keptState({ sha256, manifest }: Bundle): Promise<Float32Array | null> {
    return this.#outbox.keptState(sha256, keptStateSize(manifest));
  }

  /**
   * Return the bundle, opened once, and the data as it takes them. size: the elements of the task's model. training: what
   * the engines may be measured with; null where one thread will do.
   */
  async #open(sha256: string, size: number, training: Training | null): Promise<{ bundle: Bundle; data: FittedData }> {
    if (this.#opened?.bundle.sha256 !== sha256) {
      await this.#close(); // two models at a time may be more than the memory holds
      const engine = await this.#start(sha256, training);
      this.engine = engine.name;
      try {
        const bundle = await openBundle(sha256, this.#contents, engine);
        this.#opened = { bundle, data: new FittedData(this.#columns, bundle.manifest.batch) };
      } catch (error) {
        engine.close();
        throw error;
      }
    }
    const expected = this.#opened!.bundle.manifest.size;
    if (size !== expected) {
      throw new ProtocolError("wrong-length", `the round's model has ${size} elements; the bundle's has ${expected}`);
    }
    return this.#opened!;
  }

  async #close(): Promise<void> {
    const opened = this.#opened;
    this.#opened = null;
    await opened?.bundle.runtime.close();
    opened?.bundle.engine.close();
  }

  /** Start the engine that the page asks for, or the quickest. */
  async #start(sha256: string, training: Training | null): Promise<Engine> {
    const { runtime, store, log } = this.#runtimes;
    if (runtime !== undefined) return this.#started(runtime);
    if (training === null || training.end - performance.now() < ENOUGH_TO_MEASURE) return this.#started("wasm");
    const open = (engine: Engine): Promise<Trial> => this.#try(sha256, training, engine);
    const { engine, why } = await chooseRuntime(sha256, store, open, this.#runtimes);
    log(`training with ${engine}: ${why}`, "info");
    try {
      return await this.#started(engine);
    } catch (error) {
      if (engine === "wasm") throw error;
      log(`${engine} cannot be started any more: ${(error as Error).message}`, "warning");
      return this.#started("wasm");
    }
  }

  /** Return the engine that `prepare` started, if it is this one, or start it. */
  async #started(name: EngineName): Promise<Engine> {
    const spare = this.#spare;
    this.#spare = null;
    if (spare?.name === name) return spare;
    spare?.close();
    return startEngine(name, this.#runtimes.runtimeFiles);
  }

  /** Begin steps on an engine with a batch of the device's data. */
  async #try(sha256: string, { task, model }: Training, engine: Engine): Promise<Trial> {
    const bundle = await openBundle(sha256, this.#contents, engine);
    const { runtime, manifest } = bundle;
    const { hyper } = hyperOf(task, manifest);
    await loadModel(bundle, model, null);
    const data = new FittedData(this.#columns, manifest.batch);
    const [batch] = data.batches(Math.min(task.batch_size || TRIAL_BATCH, TRIAL_BATCH), null);
    return {
      step: async () => {
        await runtime.step(batch!, task.seed, hyper);
        await this.#countBatch();
      },
      parameters: () => runtime.parameters(),
      close: () => runtime.close(),
    };
  }

  /** Leave the engine after it failed: its memory may be full, or its GPU gone. The next task begins with another. */
  async #leaveEngine(error: TrainingError): Promise<void> {
    const { engine, sha256 } = this.#opened?.bundle ?? {};
    await this.#close().catch(() => {}); // it is broken
    if (engine === undefined || sha256 === undefined || engine.name === "wasm") return;
    const finding = { engine: "wasm", why: `${engine.name} failed: ${error.message}` } as const;
    await rememberRuntime(sha256, this.#runtimes.store, finding);
  }

  async #countBatch(): Promise<void> {
    this.batches += 1;
    if (performance.now() - this.#turnBegan > TURN) {
      this.onProgress();
      await turn();
      this.#turnBegan = performance.now();
    }
    if (this.halt) throw new StoppedError("training was stopped");
  }
}

/** Return whether the task's update is to be masked. The session gives back tasks with `secure` that lack what it needs. */
function isMasked(task: Task): task is MaskedTask {
  return task.secure !== null;
}

/** Throw TrainingError unless a task asks for the values of buffers, uncompressed, exactly where the bundle has some. */
function checkParts({ parts }: Task, manifest: Manifest): void {
  const has = bufferRows(manifest.parameters).length > 0;
  if ("buffers" in parts !== has || (has && parts.buffers !== "float32")) {
    const needed = has ? "must ask for the part buffers as float32" : "must not ask for the part buffers";
    const text = `a task of bundle ${manifest.name} ${needed}: coordinator and device are of different versions`;
    throw new TrainingError("unsupported", text);
  }
}

/** A task, its model, and when its time is over. */
interface Training {
  readonly task: Task;
  readonly model: Float32Array;
  readonly end: number;
}

/** Let what else waits in this thread have its turn. A timer would wait some milliseconds after a few turns. */
export function turn(): Promise<void> {
  return new Promise((resolve) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => {
      port1.close();
      resolve();
    };
    port2.postMessage(null);
  });
}

type Answer = (trainer: Trainer, question: Question, seconds: number) => Promise<Record<string, unknown>>;

/** Kind of question -> the function that works out the reply's content, in at most this many seconds. */
export const ANSWERS: Record<string, Answer> = {
  evaluation: async (trainer, question, seconds) => ({ ...(await trainer.evaluate(question, seconds)) }),
  fit: async (trainer, question, seconds) => ({ ...(await trainer.fit(question, seconds)) }),
};
