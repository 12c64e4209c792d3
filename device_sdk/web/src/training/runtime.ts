/** graphs/train.onnx and graphs/eval.onnx on onnxruntime-web. */

import { env, InferenceSession, Tensor } from "onnxruntime-web/wasm";
import { BundleError } from "../protocol/errors.ts";
import { EVAL, elementsOf, FROZEN, type Manifest, type Reference, TRAIN } from "../protocol/manifest.ts";
import type { Evaluation } from "../protocol/messages.ts";
import type { Batch, Numbers } from "./data.ts";
import { TrainingError } from "./errors.ts";

/** What of a runtime is loaded beside the local model. What is left out begins as the bundle says. */
export interface Loading {
  /** What updates are made against: shape (P,). Left out: what travels of the model. */
  readonly anchor?: Float32Array;
  /** Added to each gradient: shape (P,). Left out: zeros. */
  readonly correction?: Float32Array | undefined;
  /** MOON's model of the task before: shape (P,). Left out: the anchor. */
  readonly previous?: Float32Array | undefined;
  /** The step's state. Left out: the initial state, with the kept rows as they are now. */
  readonly state?: Float32Array | undefined;
}

type Tensors = Record<string, Tensor>;
interface Row {
  readonly name: string;
  readonly shape: readonly number[];
  readonly offset: number;
}

export class Runtime {
  readonly manifest: Manifest;
  /** What updates are made against: shape (P,). */
  anchor = new Float32Array(0);
  /** Of the last step. */
  metrics: Record<string, number> = {};
  readonly #train: InferenceSession;
  readonly #eval: InferenceSession;
  readonly #initialState: Float32Array;
  /** The parameters and the state by the step's names: views into vectors, and after a step its outputs. */
  #now: Tensors = {};
  #references: Tensors = {};

  private constructor(manifest: Manifest, train: InferenceSession, evaluation: InferenceSession, state: Float32Array) {
    this.manifest = manifest;
    this.#train = train;
    this.#eval = evaluation;
    this.#initialState = state;
  }

  /** What trains: for the check-in. */
  static get name(): string {
    return `onnx ${env.versions.web ?? ""} web wasm`;
  }

  /**
   * Open a bundle. read: returns a file of it. initialState: shape (stateSize,). Rejects with BundleError where the
   * runtime cannot load a graph, or a graph has other names than the manifest.
   */
  static async open(
    manifest: Manifest,
    read: (path: string) => Promise<Uint8Array>,
    initialState: Float32Array,
  ): Promise<Runtime> {
    env.wasm.numThreads = 1;
    const frozen = FROZEN in manifest.files ? await read(FROZEN) : null;
    const open = async (path: string): Promise<InferenceSession> => {
      const data = frozen && { externalData: [{ path: "frozen.safetensors", data: frozen }] };
      try {
        return await InferenceSession.create(await read(path), {
          executionProviders: ["wasm"],
          logSeverityLevel: 4,
          ...data,
        });
      } catch (error) {
        throw new BundleError("bad-message", `onnxruntime-web cannot load ${path}: ${(error as Error).message}`);
      }
    };
    const train = await open(TRAIN);
    const runtime = new Runtime(manifest, train, await open(EVAL), initialState);
    const params = manifest.parameters.map((row) => `param.${row.name}`);
    const state = manifest.state.map((row) => `state.${row.name}`);
    const batch = manifest.batch.map((row) => `batch.${row.name}`);
    checkNames(TRAIN, train, {
      inputs: [...params, ...state, ...batch, ...runtime.#fixedNames()],
      outputs: [
        ...[...params, ...state].map((name) => `next.${name}`),
        "loss",
        ...manifest.metrics.map((name) => `metric.${name}`),
      ],
    });
    checkNames(EVAL, runtime.#eval, {
      inputs: [...params, ...batch],
      outputs: ["loss_sum", "examples", ...manifest.metrics.map((name) => `metric_sum.${name}`)],
    });
    return runtime;
  }

  async close(): Promise<void> {
    await this.#train.release();
    await this.#eval.release();
  }

  /** Return a copy of the parameters, the personal ones last: shape (localSize,). */
  get local(): Float32Array {
    return gathered(this.#now, "param", this.manifest.parameters);
  }

  /** Return a copy of what travels of the parameters: shape (P,). */
  get parameters(): Float32Array {
    return this.local.slice(0, this.manifest.size);
  }

  /** Return a copy of the step's state: shape (stateSize,). */
  get state(): Float32Array {
    return gathered(this.#now, "state", this.manifest.state);
  }

  /** Load a local model, shape (localSize,). The vectors must not be written to afterwards. */
  load(local: Float32Array, loading: Loading = {}): void {
    const { manifest } = this;
    const anchor = loading.anchor ?? local.subarray(0, manifest.size);
    const references: Record<Reference, Float32Array> = {
      anchor,
      correction: loading.correction ?? new Float32Array(manifest.size),
      previous: loading.previous ?? anchor,
    };
    const state = loading.state ?? this.#begunState();
    this.anchor = new Float32Array(anchor);
    this.#now = { ...tensors(local, "param", manifest.parameters), ...tensors(state, "state", manifest.state) };
    const travelling = manifest.parameters.filter((row) => !row.personal);
    this.#references = {};
    for (const reference of manifest.references) {
      Object.assign(this.#references, tensors(references[reference], reference, travelling));
    }
    this.metrics = {};
  }

  /** Do one step and return its loss, measured before it. Rejects with TrainingError (runtime-error). */
  async step(batch: Batch, seed: number, hyper: Readonly<Record<string, number>>): Promise<number> {
    const feeds: Tensors = { ...this.#now, ...this.#references, ...this.#batch(batch) };
    for (const row of this.manifest.hyper) {
      feeds[`hyper.${row.name}`] = new Tensor("float32", Float32Array.of(hyper[row.name]!), []);
    }
    if (this.manifest.random) feeds.seed = new Tensor("int64", BigInt64Array.of(BigInt(seed)), []);
    const results = await run(this.#train, TRAIN, feeds);
    this.#now = Object.fromEntries(Object.keys(this.#now).map((name) => [name, results[`next.${name}`]!]));
    this.metrics = Object.fromEntries(this.manifest.metrics.map((name) => [name, scalar(results[`metric.${name}`]!)]));
    return scalar(results.loss!);
  }

  /** Return the sums over a batch. Rejects with TrainingError (runtime-error). */
  async evaluate(batch: Batch): Promise<Evaluation> {
    const params = Object.entries(this.#now).filter(([name]) => name.startsWith("param."));
    const results = await run(this.#eval, EVAL, { ...Object.fromEntries(params), ...this.#batch(batch) });
    const sums = this.manifest.metrics.map((name) => [name, scalar(results[`metric_sum.${name}`]!)]);
    return {
      examples: scalar(results.examples!),
      loss_sum: scalar(results.loss_sum!),
      metric_sums: Object.fromEntries(sums),
    };
  }

  /** The inputs of the step that are the same in all steps of a task. */
  #fixedNames(): string[] {
    const { references, parameters, hyper, random } = this.manifest;
    const travelling = parameters.filter((row) => !row.personal);
    return [
      ...references.flatMap((reference) => travelling.map((row) => `${reference}.${row.name}`)),
      ...hyper.map((row) => `hyper.${row.name}`),
      ...(random ? ["seed"] : []),
    ];
  }

  #begunState(): Float32Array {
    const begun = this.#initialState.slice();
    for (const row of this.manifest.state) {
      const now = this.#now[`state.${row.name}`];
      if (row.kept && now !== undefined) begun.set(now.data as Float32Array, row.offset);
    }
    return begun;
  }

  #batch({ arrays, examples }: Batch): Tensors {
    return Object.fromEntries(
      this.manifest.batch.map((row, place) => [
        `batch.${row.name}`,
        tensor(row.dtype, arrays[place]!, [examples, ...row.shape]),
      ]),
    );
  }
}

function tensor(dtype: string, values: Numbers, shape: readonly number[]): Tensor {
  return new Tensor(dtype as "float32", values as Float32Array, shape);
}

/** Return the tensors of a vector, by the graphs' names: views into it. */
function tensors(vector: Float32Array, prefix: string, table: readonly Row[]): Tensors {
  return Object.fromEntries(
    table.map((row) => {
      const values = vector.subarray(row.offset, row.offset + elementsOf(row));
      return [`${prefix}.${row.name}`, tensor("float32", values, row.shape)];
    }),
  );
}

function gathered(from: Tensors, prefix: string, table: readonly Row[]): Float32Array {
  const vector = new Float32Array(table.reduce((size, row) => size + elementsOf(row), 0));
  for (const row of table) vector.set(from[`${prefix}.${row.name}`]!.data as Float32Array, row.offset);
  return vector;
}

function scalar(found: Tensor): number {
  return Number(found.data[0]);
}

async function run(session: InferenceSession, path: string, feeds: Tensors): Promise<Readonly<Record<string, Tensor>>> {
  try {
    return (await session.run(feeds)) as Readonly<Record<string, Tensor>>;
  } catch (error) {
    const text = `onnxruntime-web could not run ${path}: ${(error as Error).message ?? error}`;
    throw new TrainingError(
      /out of memory|bad_alloc|Cannot enlarge memory/i.test(text) ? "out-of-memory" : "runtime-error",
      text,
    );
  }
}

function checkNames(path: string, session: InferenceSession, expected: { inputs: string[]; outputs: string[] }): void {
  for (const [what, found, wanted] of [
    ["inputs", session.inputNames, expected.inputs],
    ["outputs", session.outputNames, expected.outputs],
  ] as const) {
    const differing = [
      ...found.filter((name) => !wanted.includes(name)),
      ...wanted.filter((name) => !found.includes(name)),
    ];
    if (differing.length > 0) {
      throw new BundleError("bad-message", `${path} and the manifest differ in these ${what}: ${differing.join(", ")}`);
    }
  }
}
