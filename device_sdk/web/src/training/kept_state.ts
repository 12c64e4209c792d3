/**
 * The kept state: what a device keeps from one task to the next of the same bundle, as one flat vector.
 *
 * It holds the personal parameters, then the rows of the step's state that the manifest marks as `kept`, then, where the
 * step reads `previous`, the travelling parameters with which the last task ended. It never leaves the device.
 */

import { elementsOf, type Manifest } from "../protocol/manifest.ts";
import type { Bundle } from "./bundle.ts";
import type { Runtime } from "./runtime.ts";

/** Return the elements of the kept state; 0 where a device keeps nothing for such a bundle. */
export function keptStateSize(manifest: Manifest): number {
  const rows = keptRows(manifest).reduce((size, [begin, end]) => size + end - begin, 0);
  return manifest.localSize - manifest.size + rows + previousSize(manifest);
}

/** Return the kept state as the runtime has it now. local: the runtime's parameters. */
export async function collectKeptState(runtime: Runtime, local: Float32Array): Promise<Float32Array> {
  const { manifest } = runtime;
  const state = await runtime.state();
  const parts = [
    local.subarray(manifest.size),
    ...keptRows(manifest).map(([begin, end]) => state.subarray(begin, end)),
    local.subarray(0, previousSize(manifest)),
  ];
  return concatenated(parts);
}

/** Load the round's model, shape (P,), and the kept state; null at the device's first task of the bundle. */
export function loadModel(
  { runtime, manifest, ...bundle }: Bundle,
  model: Float32Array,
  keptState: Float32Array | null,
  correction?: Float32Array,
): Promise<void> {
  const state = bundle.state.slice();
  let { personal } = bundle;
  let previous: Float32Array | undefined;
  if (keptState !== null) {
    let place = manifest.localSize - manifest.size;
    personal = keptState.subarray(0, place);
    for (const [begin, end] of keptRows(manifest)) {
      state.set(keptState.subarray(place, place + end - begin), begin);
      place += end - begin;
    }
    if (previousSize(manifest) > 0) previous = keptState.subarray(place);
  }
  const local = personal.length > 0 ? concatenated([model, personal]) : model;
  return runtime.load(local, { state, previous, correction });
}

function keptRows(manifest: Manifest): [number, number][] {
  return manifest.state.filter((row) => row.kept).map((row) => [row.offset, row.offset + elementsOf(row)]);
}

function previousSize(manifest: Manifest): number {
  return manifest.references.includes("previous") ? manifest.size : 0;
}

function concatenated(parts: readonly Float32Array[]): Float32Array {
  const whole = new Float32Array(parts.reduce((size, part) => size + part.length, 0));
  let begin = 0;
  for (const part of parts) {
    whole.set(part, begin);
    begin += part.length;
  }
  return whole;
}
