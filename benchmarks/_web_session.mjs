// A contender of web.py: the bundle by onnxruntime-web's own API, InferenceSession, which copies all tensors at each run.

import { env, InferenceSession, Tensor } from "onnxruntime-web/wasm";
import { answer, elementsOf } from "./_web_worker.mjs";

answer(async ({ engine, examples }, { manifest, parameters, batches, train }) => {
  env.wasm.numThreads = Number(/[0-9]+/.exec(engine)?.[0] ?? 1);
  env.wasm.wasmPaths = new URL("./", import.meta.url).href;
  const session = await InferenceSession.create(train, { executionProviders: ["wasm"], logSeverityLevel: 4 });
  let now = Object.fromEntries(
    manifest.parameters.map(({ name, shape, offset }) => {
      const values = parameters.subarray(offset, offset + elementsOf(shape));
      return [`param.${name}`, new Tensor("float32", values, shape)];
    }),
  );
  return async (number, lr) => {
    const batch = batches[number % batches.length];
    const feeds = { ...now, "hyper.lr": new Tensor("float32", Float32Array.of(lr), []) };
    for (const { name, dtype, shape } of manifest.batch) {
      feeds[`batch.${name}`] = new Tensor(dtype, batch[name], [examples, ...shape]);
    }
    const found = await session.run(feeds);
    now = Object.fromEntries(Object.keys(now).map((name) => [name, found[`next.${name}`]]));
    return found.loss.data[0];
  };
});
