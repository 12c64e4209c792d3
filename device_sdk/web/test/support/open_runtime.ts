/**
 * Trains and uses a bundle by itself, as a program would: `node open_runtime.mjs BUNDLE DATA.npz OUTPUT`.
 *
 * OUTPUT gets what it found as numbers.json, and the vectors as files of float32.
 */

import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { type Column, type Columns, MemoryStore, openRuntime, openSharedModel } from "../../src/index.ts";
import { readManifest } from "../../src/protocol/manifest.ts";
import { sha256 } from "../../src/protocol/sha256.ts";
import { bytesOf } from "../../src/storage/outbox.ts";
import { json } from "../../src/storage/store.ts";
import { readNpz } from "./npz.ts";

const [folder, npz, output] = process.argv.slice(2) as [string, string, string];
setInterval(() => {}, 1000); // as in train_tasks.ts
const data = readNpz(npz);
const rows = (count: number): Columns =>
  Object.fromEntries(
    Object.entries(data).map(([name, { values, shape }]): [string, Column] => {
      const length = shape.slice(1).reduce((product, size) => product * size, 1);
      return [name, { values: values.slice(0, count * length) as Column["values"], shape: [count, ...shape.slice(1)] }];
    }),
  );
const write = (name: string, vector: Float32Array): void => writeFileSync(join(output, name), vector);

const runtime = await openRuntime(async (path) => new Uint8Array(readFileSync(join(folder, path))));
write("initial.bin", await runtime.local());
const { x } = data;
const { output: first } = await runtime.predict({ x: x! });
const losses: number[] = [];
for (let seed = 0; seed < 3; seed++) losses.push(await runtime.step(rows(20), { lr: 0.1 }, { seed }));
const { metrics } = runtime;
write("parameters.bin", await runtime.parameters());
write("local.bin", await runtime.local());
const evaluation = await runtime.evaluate(data);
const { output: last } = await runtime.predict(data); // labels are not read
write("predicted.bin", last!.values as Float32Array);
await runtime.load(new Float32Array(runtime.manifest.size));
const zeros = (await runtime.parameters()).every((value) => value === 0);
await runtime.close();

const errors: string[] = [];
const said = async (act: () => Promise<unknown>): Promise<void> => {
  await act().then(
    () => errors.push("nothing"),
    (error: Error) => errors.push(error.message),
  );
};
const again = await openRuntime(async (path) => new Uint8Array(readFileSync(join(folder, path))));
await said(() => again.step(rows(20), { rate: 1 }));
await said(() => again.load(new Float32Array(3)));
await said(() => again.predict({ z: x! }));
await said(() =>
  openRuntime(async (path) => {
    const found = new Uint8Array(readFileSync(join(folder, path)));
    if (path === "graphs/train.onnx") found[100]! ^= 1;
    return found;
  }),
);

// The same model as a device has it after a task.
const store = new MemoryStore();
const manifest = new Uint8Array(readFileSync(join(folder, "manifest.json")));
const model = bytesOf(await again.parameters());
const newest = { bundle: sha256(manifest), sha256: sha256(model), encoding: "float32" };
await store.write({ [`file/${newest.bundle}`]: manifest, [`model/${newest.sha256}`]: model, newest: json(newest) });
const { files } = readManifest(manifest);
const keep = async (paths: string[]): Promise<void> => {
  for (const path of paths) {
    await store.write({ [`file/${files[path]!.sha256}`]: new Uint8Array(readFileSync(join(folder, path))) });
  }
};
await keep(Object.keys(files).filter((path) => path !== "graphs/infer.onnx"));
const without = (await openSharedModel(store))!;
await said(() => without.predict({ x: x! }));
await without.close();
await keep(["graphs/infer.onnx"]);
const shared = (await openSharedModel(store))!;
const one = (await shared.predict({ x: x! })).output!.values as Float32Array;
const other = (await again.predict({ x: x! })).output!.values as Float32Array;
const difference = one.reduce((most, value, place) => Math.max(most, Math.abs(value - other[place]!)), 0);
await shared.close();

const found = { losses, metrics, evaluation, zeros, shapes: [first!.shape, last!.shape], errors, shared: difference };
writeFileSync(join(output, "numbers.json"), JSON.stringify(found));
process.exit(0);
