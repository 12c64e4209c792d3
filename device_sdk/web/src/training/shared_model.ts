/** The newest model that a device has downloaded, to be tried on examples: nothing is trained, and nothing is sent. */

import { findEncoding } from "../protocol/encodings.ts";
import { ProtocolError } from "../protocol/errors.ts";
import { INFER } from "../protocol/manifest.ts";
import type { Evaluation } from "../protocol/messages.ts";
import { type RuntimeOptions, startEngine } from "../runtimes/choose.ts";
import type { Column } from "../runtimes/columns.ts";
import { Contents } from "../storage/contents.ts";
import { Outbox } from "../storage/outbox.ts";
import type { Store } from "../storage/store.ts";
import { openBundle } from "./bundle.ts";
import { type Columns, FittedData } from "./data.ts";
import { keptStateSize, loadModel } from "./kept_state.ts";
import { Predictor } from "./prediction.ts";
import { evaluateData } from "./train.ts";

export interface SharedModel {
  /** Return the sums of loss and metrics over these examples. Rejects with DataError, TrainingError. */
  evaluate(data: Columns): Promise<Evaluation>;
  /** Return the model's outputs for these examples, by name; labels may be left out. The device must have fetched the model
   * that predicts (its option `predicts`). Rejects with DataError, TrainingError, ProtocolError (unknown-content). */
  predict(data: Columns): Promise<Record<string, Column>>;
  close(): Promise<void>;
}

/**
 * Open the model of the device's last task, on one thread of the processor, with the device's own parameters where the bundle
 * has such; a device may use the same store meanwhile. Returns null where the store has none: no task was begun yet, or its
 * model made room for the next one's, which is still arriving. Rejects with BundleError, StoreError.
 */
export async function openSharedModel(
  store: Store,
  { runtimeFiles }: Pick<RuntimeOptions, "runtimeFiles"> = {},
): Promise<SharedModel | null> {
  const contents = new Contents(store);
  const newest = await contents.newest();
  if (newest === undefined) return null;
  try {
    const content = await contents.vector(newest.sha256);
    const engine = await startEngine("wasm", runtimeFiles);
    const bundle = await openBundle(newest.bundle, contents, engine);
    const { manifest, runtime } = bundle;
    const keptState = await new Outbox(store).keptState(newest.bundle, keptStateSize(manifest));
    await loadModel(bundle, findEncoding(newest.encoding).decode(content), keptState);
    let predictor: Promise<Predictor> | null = null;
    const open = async (): Promise<Predictor> => {
      const infer = await contents.file(manifest.files[INFER]!.sha256).catch(() => {
        const text = "the device has not fetched the model that predicts: give `Device` the option `predicts: true`";
        throw new ProtocolError("unknown-content", text);
      });
      return Predictor.open(manifest, infer, await runtime.local(), engine);
    };
    return {
      evaluate: (data) =>
        evaluateData(runtime, new FittedData(data, manifest.batch), { batchSize: 0, onBatch: async () => {} }),
      predict: async (data) => {
        predictor ??= open();
        return (await predictor).predict(data);
      },
      close: async () => {
        await (await predictor?.catch(() => null))?.close();
        await runtime.close();
        engine.close();
      },
    };
  } catch (error) {
    if (error instanceof ProtocolError && error.code === "unknown-content") return null;
    throw error;
  }
}
