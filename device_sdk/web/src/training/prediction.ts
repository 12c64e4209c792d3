/** What a model says of examples: a bundle's infer.onnx with a model's parameters in it. */

import { elementsOf, INFER, type Manifest } from "../protocol/manifest.ts";
import type { Column } from "../runtimes/columns.ts";
import type { Engine, Graph, Value } from "../runtimes/engine.ts";
import { type Columns, FittedData } from "./data.ts";
import { TrainingError } from "./errors.ts";

/** Return infer.onnx with the parameters of a vector written into it: a model that any ONNX Runtime runs.
 * vector: shape (P,) (then the personal parameters keep their initial values) or (localSize,). */
export function inferenceModel(manifest: Manifest, infer: Uint8Array, vector: Float32Array): Uint8Array {
  const content = infer.slice();
  for (const row of manifest.parameters) {
    if (row.infer_offset === null || row.offset >= vector.length) continue;
    const values = vector.slice(row.offset, row.offset + elementsOf(row)); // a copy has an offset that any bytes may have
    content.set(new Uint8Array(values.buffer), row.infer_offset);
  }
  return content;
}

/** A model that predicts, in an engine's memory. */
export class Predictor {
  readonly #manifest: Manifest;
  readonly #engine: Engine;
  readonly #graph: Graph;

  private constructor(manifest: Manifest, engine: Engine, graph: Graph) {
    this.#manifest = manifest;
    this.#engine = engine;
    this.#graph = graph;
  }

  /** vector: as for `inferenceModel`. Rejects with TrainingError. */
  static async open(manifest: Manifest, infer: Uint8Array, vector: Float32Array, engine: Engine): Promise<Predictor> {
    try {
      return new Predictor(manifest, engine, await engine.open(inferenceModel(manifest, infer, vector)));
    } catch (error) {
      throw new TrainingError("runtime-error", `onnxruntime-web cannot load ${INFER}: ${(error as Error).message}`);
    }
  }

  /** Return the model's outputs for these examples, by name. Arrays that the model does not read, such as labels, may be
   * left out. Rejects with DataError, TrainingError. */
  async predict(data: Columns): Promise<Record<string, Column>> {
    const inputs = this.#manifest.batch.filter((row) => this.#graph.inputs.includes(row.name));
    const names = this.#manifest.batch.map((row) => row.name);
    const unread = (name: string): boolean => names.includes(name) && !inputs.some((row) => row.name === name);
    const given = Object.fromEntries(Object.entries(data).filter(([name]) => !unread(name)));
    const fitted = new FittedData(given, inputs);
    const [batch] = fitted.batches(0, null);
    const values: Record<string, Value> = {};
    try {
      for (const [place, row] of inputs.entries()) {
        const value = this.#engine.value(row.dtype, [fitted.examples, ...row.shape]);
        values[row.name] = value;
        value.write(batch!.arrays[place]!);
      }
      return await this.#graph.compute(values);
    } catch (error) {
      throw new TrainingError("runtime-error", `onnxruntime-web could not run ${INFER}: ${(error as Error).message}`);
    } finally {
      for (const value of Object.values(values)) value.free();
    }
  }

  async close(): Promise<void> {
    await this.#graph.close();
  }
}
