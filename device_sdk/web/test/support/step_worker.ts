/**
 * A worker that does a bundle's steps on an engine, for tests in a browser and for benchmarks/web.py. It answers each
 * message, {do, ...}, with {found} or {error}. The bundle's files and its batches are fetched from `folder`.
 */

import { type Manifest, PARAMETERS, readManifest, STATE } from "../../src/protocol/manifest.ts";
import { candidates, chooseRuntime, startEngine } from "../../src/runtimes/choose.ts";
import type { Numbers } from "../../src/runtimes/columns.ts";
import type { Engine, EngineName } from "../../src/runtimes/engine.ts";
import { MemoryStore } from "../../src/storage/store.ts";
import { readSafetensors } from "../../src/training/bundle.ts";
import { type Batch, FittedData } from "../../src/training/data.ts";
import { Runtime } from "../../src/training/runtime.ts";

interface Model {
  manifest: Manifest;
  parameters: Float32Array;
  state: Float32Array;
  batches: Batch[];
}

const ARRAYS = { float32: Float32Array, int64: BigInt64Array } as const;
let folder = "";
let model: Model;
let engine: Engine;
let runtime: Runtime;
let done = 0;
const store = new MemoryStore();

async function read(path: string): Promise<Uint8Array> {
  const answer = await fetch(`${folder}/${path}`);
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return new Uint8Array(await answer.arrayBuffer());
}

/** examples: of each batch. The arrays are in batch-NAME.bin, one batch after the other. */
async function readModel(examples: number): Promise<Model> {
  const manifest = readManifest(await read("manifest.json"));
  const parameters = new Float32Array(manifest.localSize);
  readSafetensors(await read(PARAMETERS), manifest.parameters, parameters, PARAMETERS);
  const state = new Float32Array(manifest.stateSize);
  if (STATE in manifest.files) readSafetensors(await read(STATE), manifest.state, state, STATE);
  const columns = await Promise.all(
    manifest.batch.map(async (row) => {
      const { buffer } = await read(`batch-${row.name}.bin`);
      const values: Numbers = new ARRAYS[row.dtype as "float32"](buffer as ArrayBuffer);
      const count = values.length / row.shape.reduce((product, size) => product * size, 1);
      return [row.name, { values, shape: [count, ...row.shape] }] as const;
    }),
  );
  const batches = [...new FittedData(Object.fromEntries(columns), manifest.batch).batches(examples, null)];
  return { manifest, parameters, state, batches };
}

async function open(on: Engine): Promise<Runtime> {
  const opened = await Runtime.open(model.manifest, read, model.state, on);
  await opened.load(model.parameters);
  return opened;
}

function step(on: Runtime, number: number, lr: number): Promise<number> {
  return on.step(model.batches[number % model.batches.length]!, number, { ...defaults(), lr });
}

function defaults(): Record<string, number> {
  return Object.fromEntries(model.manifest.hyper.map((row) => [row.name, row.default ?? 0]));
}

const actions = {
  async open(message: { folder: string; engine: EngineName; examples: number }): Promise<string> {
    ({ folder } = message);
    model = await readModel(message.examples);
    engine = await startEngine(message.engine);
    runtime = await open(engine);
    done = 0;
    return engine.name;
  },
  /** Returns the loss of the last step, and the milliseconds of all. */
  async steps({ count, lr }: { count: number; lr: number }): Promise<{ loss: number; milliseconds: number }> {
    let loss = 0;
    const begin = performance.now();
    for (let number = 0; number < count; number++) loss = await step(runtime, done++, lr);
    return { loss, milliseconds: performance.now() - begin };
  },
  parameters: (): Promise<Float32Array> => runtime.parameters(),
  async close(): Promise<void> {
    await runtime.close();
    engine.close();
  },
  /** Returns which engine is the quickest, as a device finds it. */
  async choose(message: { folder: string; examples: number; lr: number }): Promise<unknown> {
    ({ folder } = message);
    model = await readModel(message.examples);
    const finding = await chooseRuntime("bundle", store, async (on) => {
      const opened = await open(on);
      return {
        step: async () => void (await step(opened, 0, message.lr)),
        parameters: () => opened.parameters(),
        close: () => opened.close(),
      };
    });
    return { ...finding, ...(await candidates()) };
  },
};

// biome-ignore lint/suspicious/noExplicitAny: a test sends what the action takes
type Actions = Record<string, (message: any) => Promise<unknown>>;

addEventListener("message", async ({ data }: MessageEvent) => {
  try {
    postMessage({ found: await (actions as Actions)[data.do]!(data) });
  } catch (error) {
    postMessage({ error: String(error) });
  }
});
