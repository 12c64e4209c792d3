/** graphs/train.onnx and graphs/eval.onnx on an engine. */

import { BundleError } from "../protocol/errors.ts";
import { EVAL, elementsOf, FROZEN, type Manifest, type Reference, TRAIN } from "../protocol/manifest.ts";
import type { Evaluation } from "../protocol/messages.ts";
import type { Engine, Graph, Value, Values } from "../runtimes/engine.ts";
import type { Batch } from "./data.ts";
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

/** The room of one vector: a tensor for each row of a table, by the step's names. */
interface Block {
  readonly table: readonly Row[];
  readonly values: Values;
}
interface Row {
  readonly name: string;
  readonly shape: readonly number[];
  readonly offset: number;
}
/** What a step changes. */
interface Model {
  readonly params: Block;
  readonly state: Block;
}

export class Runtime {
  readonly manifest: Manifest;
  /** What updates are made against: shape (P,). */
  anchor: Float32Array = new Float32Array(0);
  /** Of the last step. */
  metrics: Record<string, number> = {};
  readonly #engine: Engine;
  readonly #train: Graph;
  readonly #eval: Graph;
  readonly #initialState: Float32Array;
  /** The model as it is now, and the room of the next step's outputs. */
  #now: Model;
  #next: Model;
  readonly #references: Partial<Record<Reference, Block>> = {};
  readonly #hyper: Values;
  readonly #seed: Values;
  #loaded = false;

  private constructor(manifest: Manifest, engine: Engine, train: Graph, evaluation: Graph, state: Float32Array) {
    this.manifest = manifest;
    this.#engine = engine;
    this.#train = train;
    this.#eval = evaluation;
    this.#initialState = state;
    const block = (prefix: string, table: readonly Row[]): Block => ({
      table,
      values: Object.fromEntries(
        table.map((row) => [`${prefix}.${row.name}`, engine.value("float32", row.shape)] as const),
      ),
    });
    const model = (): Model => ({ params: block("param", manifest.parameters), state: block("state", manifest.state) });
    this.#now = model();
    this.#next = model();
    const travelling = manifest.parameters.filter((row) => !row.personal);
    for (const reference of manifest.references) this.#references[reference] = block(reference, travelling);
    this.#hyper = Object.fromEntries(
      manifest.hyper.map((row) => [`hyper.${row.name}`, engine.value("float32", [])] as const),
    );
    this.#seed = manifest.random ? { seed: engine.value("int64", []) } : {};
  }

  /**
   * Open a bundle. read: returns a file of it. initialState: shape (stateSize,). Rejects with BundleError where the
   * engine cannot load a graph, or a graph has other names than the manifest, and with TrainingError (out-of-memory).
   */
  static async open(
    manifest: Manifest,
    read: (path: string) => Promise<Uint8Array>,
    initialState: Float32Array,
    engine: Engine,
  ): Promise<Runtime> {
    const files = FROZEN in manifest.files ? { "frozen.safetensors": await read(FROZEN) } : {};
    const params = manifest.parameters.map((row) => `param.${row.name}`);
    const changing = [...params, ...manifest.state.map((row) => `state.${row.name}`)];
    const next = changing.map((name) => `next.${name}`);
    const open = async (path: string): Promise<Graph> => {
      try {
        return await engine.open(await read(path), { files, kept: next });
      } catch (error) {
        throw new BundleError("bad-message", `onnxruntime-web cannot load ${path}: ${(error as Error).message}`);
      }
    };
    const train = await open(TRAIN);
    const evaluation = await open(EVAL);
    const batch = manifest.batch.map((row) => `batch.${row.name}`);
    checkNames(TRAIN, train, {
      inputs: [...changing, ...batch, ...fixedNames(manifest)],
      outputs: [...next, "loss", ...manifest.metrics.map((name) => `metric.${name}`)],
    });
    checkNames(EVAL, evaluation, {
      inputs: [...params, ...batch],
      outputs: ["loss_sum", "examples", ...manifest.metrics.map((name) => `metric_sum.${name}`)],
    });
    try {
      return new Runtime(manifest, engine, train, evaluation, initialState);
    } catch (error) {
      throw failed("make room for the model", error);
    }
  }

  /** Free what it has of the engine. */
  async close(): Promise<void> {
    const models = [this.#now, this.#next].flatMap(({ params, state }) => [params, state]);
    for (const { values } of [...models, ...Object.values(this.#references)]) freeAll(values);
    freeAll(this.#hyper);
    freeAll(this.#seed);
    await this.#train.close();
    await this.#eval.close();
  }

  /** Return a copy of the parameters, the personal ones last: shape (localSize,). */
  local(): Promise<Float32Array> {
    return gathered(this.#now.params);
  }

  /** Return a copy of what travels of the parameters: shape (P,). */
  async parameters(): Promise<Float32Array> {
    const { localSize, size } = this.manifest;
    const local = await this.local();
    return localSize === size ? local : local.slice(0, size);
  }

  /** Return a copy of the step's state: shape (stateSize,). */
  state(): Promise<Float32Array> {
    return gathered(this.#now.state);
  }

  /** Load a local model, shape (localSize,). The anchor must not be written to afterwards. */
  async load(local: Float32Array, loading: Loading = {}): Promise<void> {
    const { manifest } = this;
    const anchor = loading.anchor ?? local.subarray(0, manifest.size);
    const references: Record<Reference, Float32Array | undefined> = {
      anchor,
      correction: loading.correction,
      previous: loading.previous ?? anchor,
    };
    const state = loading.state ?? (await this.#begunState());
    this.anchor = anchor;
    scatter(local, this.#now.params);
    scatter(state, this.#now.state);
    for (const reference of manifest.references) {
      scatter(references[reference] ?? new Float32Array(manifest.size), this.#references[reference]!);
    }
    this.metrics = {};
    this.#loaded = true;
  }

  /** Do one step and return its loss, measured before it. Rejects with TrainingError (runtime-error, out-of-memory). */
  async step(batch: Batch, seed: number, hyper: Readonly<Record<string, number>>): Promise<number> {
    for (const { name } of this.manifest.hyper) this.#hyper[`hyper.${name}`]!.write(Float32Array.of(hyper[name]!));
    this.#seed.seed?.write(BigInt64Array.of(BigInt(seed)));
    const references = Object.values(this.#references).map(({ values }) => values);
    const inputs: Values = Object.assign({}, ...valuesOf(this.#now), ...references, this.#hyper, this.#seed);
    const outputs: Values = Object.fromEntries(
      valuesOf(this.#next).flatMap((values) => Object.entries(values).map(([name, value]) => [`next.${name}`, value])),
    );
    const scalars = ["loss", ...this.manifest.metrics.map((name) => `metric.${name}`)];
    const [loss, ...metrics] = await this.#run(this.#train, TRAIN, batch, inputs, outputs, scalars);
    [this.#now, this.#next] = [this.#next, this.#now];
    this.metrics = Object.fromEntries(this.manifest.metrics.map((name, place) => [name, metrics[place]!]));
    return loss!;
  }

  /** Return the sums over a batch. Rejects with TrainingError (runtime-error, out-of-memory). */
  async evaluate(batch: Batch): Promise<Evaluation> {
    const { metrics } = this.manifest;
    const scalars = ["examples", "loss_sum", ...metrics.map((name) => `metric_sum.${name}`)];
    const results = await this.#run(this.#eval, EVAL, batch, this.#now.params.values, {}, scalars);
    const [examples, lossSum, ...sums] = results as [number, number, ...number[]];
    const metricSums = Object.fromEntries(metrics.map((name, place) => [name, sums[place]!]));
    return { examples, loss_sum: lossSum, metric_sums: metricSums };
  }

  async #run(
    graph: Graph,
    path: string,
    { arrays, examples }: Batch,
    inputs: Values,
    outputs: Values,
    scalars: readonly string[],
  ): Promise<number[]> {
    const batch: Record<string, Value> = {};
    try {
      for (const [place, row] of this.manifest.batch.entries()) {
        const value = this.#engine.value(row.dtype, [examples, ...row.shape]);
        batch[`batch.${row.name}`] = value;
        value.write(arrays[place]!);
      }
      return await graph.run({ ...inputs, ...batch }, outputs, scalars);
    } catch (error) {
      throw failed(`run ${path}`, error);
    } finally {
      freeAll(batch);
    }
  }

  /** Return the initial state, with the kept rows as they are now. */
  async #begunState(): Promise<Float32Array> {
    const begun = this.#initialState.slice();
    if (!this.#loaded || !this.manifest.state.some((row) => row.kept)) return begun;
    const now = await this.state();
    for (const row of this.manifest.state) {
      const end = row.offset + elementsOf(row);
      if (row.kept) begun.set(now.subarray(row.offset, end), row.offset);
    }
    return begun;
  }
}

/** Return the inputs of the step that are the same in all steps of a task. */
function fixedNames({ references, parameters, hyper, random }: Manifest): string[] {
  const travelling = parameters.filter((row) => !row.personal);
  return [
    ...references.flatMap((reference) => travelling.map((row) => `${reference}.${row.name}`)),
    ...hyper.map((row) => `hyper.${row.name}`),
    ...(random ? ["seed"] : []),
  ];
}

function valuesOf({ params, state }: Model): [Values, Values] {
  return [params.values, state.values];
}

function freeAll(values: Values): void {
  for (const value of Object.values(values)) value.free();
}

/** Write a vector to its block. */
function scatter(vector: Float32Array, { table, values }: Block): void {
  for (const [place, value] of Object.values(values).entries()) {
    const row = table[place]!;
    value.write(vector.subarray(row.offset, row.offset + elementsOf(row)));
  }
}

/** Return the vector that a block has. */
async function gathered({ table, values }: Block): Promise<Float32Array> {
  const vector = new Float32Array(table.reduce((size, row) => size + elementsOf(row), 0));
  for (const [place, value] of Object.values(values).entries()) {
    vector.set((await value.read()) as Float32Array, table[place]!.offset);
  }
  return vector;
}

function failed(what: string, error: unknown): TrainingError {
  const text = `onnxruntime-web could not ${what}: ${(error as Error).message ?? error}`;
  const memory = /out of memory|OOM|bad_alloc|Cannot enlarge memory|allocat/i.test(text);
  return new TrainingError(memory ? "out-of-memory" : "runtime-error", text);
}

function checkNames(path: string, graph: Graph, expected: { inputs: string[]; outputs: string[] }): void {
  for (const [what, found, wanted] of [
    ["inputs", graph.inputs, expected.inputs],
    ["outputs", graph.outputs, expected.outputs],
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
