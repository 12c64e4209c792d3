/**
 * Trains tasks one after the other as a device does, without a coordinator: `node train_tasks.mjs SPECS.json`.
 *
 * A spec is one device's: the bundle's folder, the data's .npz, the vectors' files by SHA-256, the tasks as messages, and
 * the folder that gets NUMBER-PART.bin and NUMBER-report.json of each task.
 */

import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { readManifest } from "../../src/protocol/manifest.ts";
import { readFromCoordinator, type Task } from "../../src/protocol/messages.ts";
import { sha256 } from "../../src/protocol/sha256.ts";
import type { MaskedTask } from "../../src/secure/task_terms.ts";
import { Contents } from "../../src/storage/contents.ts";
import { rosterLine } from "../../src/storage/device_key.ts";
import { Outbox } from "../../src/storage/outbox.ts";
import { MemoryStore } from "../../src/storage/store.ts";
import { Masker } from "../../src/training/masker.ts";
import { Trainer } from "../../src/training/trainer.ts";
import { readNpz } from "./npz.ts";

interface Spec {
  bundle: string;
  data: string;
  output: string;
  vectors: Record<string, string>;
  tasks: unknown[];
  /** Choose what computes as a page does that may have threads, on a machine with `cores` cores. */
  cores?: number;
  /** What their staleness leaves of updates that are masked later. */
  factor?: number;
  /** For a training. */
  seconds?: number;
}

async function trainAll(spec: Spec): Promise<void> {
  if (spec.cores !== undefined) {
    const navigator = { hardwareConcurrency: spec.cores, userAgent: "Node" };
    for (const [name, value] of Object.entries({ crossOriginIsolated: true, navigator })) {
      Object.defineProperty(globalThis, name, { value, configurable: true });
    }
  }
  const store = new MemoryStore();
  const manifest = new Uint8Array(readFileSync(join(spec.bundle, "manifest.json")));
  await store.write({ [`file/${sha256(manifest)}`]: manifest });
  for (const [path, entry] of Object.entries(readManifest(manifest).files)) {
    await store.write({ [`file/${entry.sha256}`]: new Uint8Array(readFileSync(join(spec.bundle, path))) });
  }
  const outbox = new Outbox(store);
  const masker = new Masker(store, "device");
  const log = (text: string): void => console.log(text);
  const trainer = new Trainer(new Contents(store), outbox, readNpz(spec.data), { store, log }, masker);
  writeFileSync(join(spec.output, "roster.txt"), await rosterLine(store, "device"));
  for (const [number, message] of spec.tasks.entries()) {
    const task = readFromCoordinator(JSON.stringify(message)) as Task;
    for (const vector of task.vectors) {
      await store.write({ [`model/${vector.sha256}`]: new Uint8Array(readFileSync(spec.vectors[vector.sha256]!)) });
    }
    const finished = await trainer.train(task, spec.seconds ?? 600);
    await outbox.save(finished);
    let { result: report, contents } = finished;
    if (report.type === "task") {
      const { update, share } = (await outbox.unmasked(task.task))!;
      const masked = await masker.mask(report as MaskedTask, update, share, spec.factor ?? 1);
      ({ report, contents } = { report: masked.report, contents: [masked.content] });
    }
    for (const [place, part] of report.parts.entries()) {
      writeFileSync(join(spec.output, `${number}-${part.name}.bin`), contents[place]!);
    }
    writeFileSync(join(spec.output, `${number}-report.json`), JSON.stringify(report));
  }
}

// A loop with nothing but WebAssembly's compilation to wait for may stand still for ever (Node's issue 54918).
setInterval(() => {}, 1000);
for (const spec of JSON.parse(readFileSync(process.argv[2]!, "utf8")) as Spec[]) await trainAll(spec);
process.exit(0);
