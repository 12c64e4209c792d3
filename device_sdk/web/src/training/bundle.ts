/** A training bundle whose files the device has: its manifest, its initial values, and its runtime. */

import { integer, list, object, oneOf, record } from "../protocol/checks.ts";
import { BundleError } from "../protocol/errors.ts";
import { elementsOf, type Manifest, PARAMETERS, readManifest, STATE } from "../protocol/manifest.ts";
import type { Engine } from "../runtimes/engine.ts";
import type { Contents } from "../storage/contents.ts";
import { Runtime } from "./runtime.ts";

export interface Bundle {
  readonly sha256: string;
  readonly manifest: Manifest;
  readonly engine: Engine;
  readonly runtime: Runtime;
  /** The initial values of the personal parameters: shape (localSize - P,). */
  readonly personal: Float32Array;
  /** The step's initial state: shape (stateSize,). */
  readonly state: Float32Array;
}

/** Returns the bytes of a bundle's file by its path, such as `graphs/train.onnx`. */
export type ReadFile = (path: string) => Promise<Uint8Array>;

/** Open a bundle that a device downloaded on an engine. Rejects with BundleError, TrainingError (out-of-memory). */
export async function openBundle(sha256: string, contents: Contents, engine: Engine): Promise<Bundle> {
  const manifest = readManifest(await contents.file(sha256));
  return openFiles(sha256, manifest, (path) => contents.file(manifest.files[path]!.sha256), engine);
}

/** Open a bundle's files on an engine. sha256: of the manifest. Rejects as `openBundle` does. */
export async function openFiles(sha256: string, manifest: Manifest, read: ReadFile, engine: Engine): Promise<Bundle> {
  if (manifest.preprocessing !== undefined) {
    throw new BundleError(
      "unknown-content",
      `the bundle ${manifest.name} says how its arrays are made of raw data (preprocessing), which this SDK does not do: ` +
        "export the model without preprocessing=, and give the page's data prepared",
    );
  }
  const state = new Float32Array(manifest.stateSize);
  if (STATE in manifest.files) readSafetensors(await read(STATE), manifest.state, state, STATE);
  const local = new Float32Array(manifest.localSize > manifest.size ? manifest.localSize : 0);
  if (local.length > 0) readSafetensors(await read(PARAMETERS), manifest.parameters, local, PARAMETERS);
  const runtime = await Runtime.open(manifest, read, state, engine);
  return { sha256, manifest, engine, runtime, personal: local.slice(manifest.size), state };
}

const entry = object({ dtype: oneOf(["F32"]), shape: list(integer(), 32), data_offsets: list(integer(), 2, 2) });
const entries = record((name) => name as string, entry, 200_000);

/** Copy a safetensors file's float32 tensors into a vector, each to the place of its row. Throws BundleError. */
export function readSafetensors(
  content: Uint8Array,
  table: readonly { name: string; shape: readonly number[]; offset: number }[],
  into: Float32Array,
  path: string,
): void {
  try {
    const length = Number(new DataView(content.buffer, content.byteOffset, 8).getBigUint64(0, true));
    const { __metadata__: _, ...header } = JSON.parse(new TextDecoder().decode(content.subarray(8, 8 + length)));
    const tensors = entries(header, path);
    for (const row of table) {
      const [begin, end] = tensors[row.name]!.data_offsets as [number, number];
      if (end - begin !== 4 * elementsOf(row)) throw new RangeError(`${row.name} has ${end - begin} bytes`);
      const bytes = content.slice(8 + length + begin, 8 + length + end);
      into.set(new Float32Array(bytes.buffer), row.offset);
    }
  } catch (error) {
    throw new BundleError("bad-message", `${path} is damaged: ${(error as Error).message}`);
  }
}
