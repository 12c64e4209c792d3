import { expect, test } from "vitest";
import { readFromCoordinator, type Task } from "../../src/protocol/messages.ts";
import type { MaskedTask } from "../../src/secure/task_terms.ts";
import { Contents } from "../../src/storage/contents.ts";
import { Outbox } from "../../src/storage/outbox.ts";
import { MemoryStore } from "../../src/storage/store.ts";
import { Masker } from "../../src/training/masker.ts";
import { Trainer } from "../../src/training/trainer.ts";
import { vectors } from "../support/vectors.ts";

test("a task whose update was masked before is not trained again, whatever became of the update", async () => {
  const task = readFromCoordinator(JSON.stringify(vectors("secure.json").training[1].task)) as Task;
  const store = new MemoryStore();
  const outbox = new Outbox(store);
  const masker = new Masker(store, "device");
  const data = { x: { values: new Float32Array(2), shape: [2] } };
  const trainer = new Trainer(new Contents(store), outbox, data, { store, log: () => {} }, masker);
  await expect(trainer.train(task, 10)).rejects.toThrow("no longer in the store"); // it would be trained
  const { report, content } = await masker.mask(task as MaskedTask, Float32Array.of(0.1), 1, 1);
  await outbox.saveMasked(report, content);
  await outbox.drop(task.task);
  const again = trainer.train(task, 10);
  await expect(again).rejects.toMatchObject({
    code: "unsupported",
    message: expect.stringContaining("made a masked update for this task already"),
  });
});
