/** onnxruntime-web on a GPU by WebGPU. What a step leaves stays on the GPU; operators that it lacks run on the processor. */

import type { InferenceSession, Tensor } from "onnxruntime-web";
import type { Column, Numbers } from "./columns.ts";
import type { DType, Engine, Graph, Opening, Value, Values } from "./engine.ts";
import { fileAddress, importFile, webgpuFile } from "./files.ts";

type Package = typeof import("onnxruntime-web");

/** Return whether there is a GPU that WebGPU reaches: not one that is computed by the processor. */
export async function hasGpu(): Promise<boolean> {
  // biome-ignore lint/suspicious/noExplicitAny: TypeScript's DOM has no types of WebGPU yet
  const { gpu } = navigator as any;
  const adapter = await gpu?.requestAdapter?.();
  return adapter != null && !(adapter.info?.isFallbackAdapter ?? adapter.isFallbackAdapter ?? false);
}

/** Load what computes on the GPU: some MB more than the processor's. folder: where its files are. */
export async function startWebgpu(folder?: string): Promise<Engine> {
  const file = webgpuFile();
  const ort: Package = await importFile(file, folder);
  ort.env.wasm.numThreads = 1;
  ort.env.wasm.wasmPaths = {
    wasm: fileAddress(`ort-wasm-simd-threaded.${file.includes("jspi") ? "jspi" : "asyncify"}.wasm`, folder),
  };
  return {
    name: "webgpu",
    open: (model, opening = {}) => WebgpuGraph.open(ort, model, opening),
    value: (dtype, shape) => new WebgpuValue(ort, dtype, shape),
    close: () => {}, // the package has no way to leave a GPU; its sessions and tensors are released one by one
  };
}

/** A tensor in JavaScript's memory after it was written, and on the GPU after a run made it. */
class WebgpuValue implements Value {
  tensor: Tensor | null = null;
  readonly #ort: Package;
  readonly #dtype: DType;
  readonly #shape: readonly number[];

  constructor(ort: Package, dtype: DType, shape: readonly number[]) {
    this.#ort = ort;
    this.#dtype = dtype;
    this.#shape = shape;
  }

  write(values: Numbers): void {
    this.replace(new this.#ort.Tensor(this.#dtype as "float32", values.slice() as Float32Array, this.#shape));
  }

  async read(): Promise<Numbers> {
    return ((await this.tensor!.getData()) as Float32Array).slice();
  }

  free(): void {
    this.tensor?.dispose();
    this.tensor = null;
  }

  replace(tensor: Tensor): void {
    this.free();
    this.tensor = tensor;
  }
}

class WebgpuGraph implements Graph {
  readonly #session: InferenceSession;

  private constructor(session: InferenceSession) {
    this.#session = session;
  }

  static async open(ort: Package, model: Uint8Array, { files = {}, kept = [] }: Opening): Promise<WebgpuGraph> {
    const session = await ort.InferenceSession.create(model, {
      executionProviders: ["webgpu"],
      logSeverityLevel: 4,
      externalData: Object.entries(files).map(([path, data]) => ({ path, data })),
      preferredOutputLocation: Object.fromEntries(kept.map((name) => [name, "gpu-buffer" as const])),
    });
    return new WebgpuGraph(session);
  }

  get inputs(): readonly string[] {
    return this.#session.inputNames;
  }

  get outputs(): readonly string[] {
    return this.#session.outputNames;
  }

  async run(inputs: Values, outputs: Values, scalars: readonly string[]): Promise<number[]> {
    const feeds = Object.fromEntries(
      Object.entries(inputs).map(([name, value]) => [name, (value as WebgpuValue).tensor!]),
    );
    const results = await this.#session.run(feeds, [...Object.keys(outputs), ...scalars]);
    for (const [name, value] of Object.entries(outputs)) (value as WebgpuValue).replace(results[name]!);
    return Promise.all(scalars.map(async (name) => Number((await results[name]!.getData())[0])));
  }

  async compute(inputs: Values): Promise<Record<string, Column>> {
    const feeds = Object.fromEntries(
      Object.entries(inputs).map(([name, value]) => [name, (value as WebgpuValue).tensor!]),
    );
    const results = Object.entries(await this.#session.run(feeds));
    const columns = results.map(async ([name, tensor]): Promise<[string, Column]> => {
      return [name, { values: (await tensor.getData()) as Float32Array, shape: tensor.dims }];
    });
    return Object.fromEntries(await Promise.all(columns));
  }

  async close(): Promise<void> {
    await this.#session.release();
  }
}
