/** A worker that asks the newest shared model of the SDK's store what a drawing is. */

import { openIndexedDb, openSharedModel } from "../../src/index.ts";
import { columnsOf } from "../draw/drawings.ts";
import type { Answer, Question } from "./guess.ts";

const LABELS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9];

async function answer({ store, pixels }: Question): Promise<Answer> {
  const opened = await openIndexedDb(store);
  try {
    const model = await openSharedModel(opened);
    if (model === null) return { is: "none" };
    const losses: number[] = [];
    for (const label of LABELS) losses.push((await model.evaluate(columnsOf([{ label, pixels }]))).loss_sum);
    await model.close();
    return { is: "losses", losses };
  } finally {
    opened.close();
  }
}

addEventListener("message", ({ data }: MessageEvent<Question>) => {
  answer(data).then(
    (found) => postMessage(found),
    (error: unknown) => postMessage({ is: "failed", text: String((error as Error).message ?? error) } satisfies Answer),
  );
});
