// What the workers of web.py's contenders share: they answer messages as device_sdk/web/test/support/step_worker.ts does.

/** Read a bundle's manifest, its parameters as one vector, and its batches: arrays by name, `examples` in each. */
export async function readBundle(folder, examples) {
  const read = async (path) => (await fetch(`${folder}/${path}`)).arrayBuffer();
  const manifest = JSON.parse(new TextDecoder().decode(await read("manifest.json")));
  const parameters = new Float32Array(await read("parameters.bin"));
  const batches = [];
  for (const row of manifest.batch) {
    const Kind = { float32: Float32Array, int64: BigInt64Array }[row.dtype];
    const values = new Kind(await read(`batch-${row.name}.bin`));
    const length = examples * elementsOf(row.shape);
    for (let begin = 0, number = 0; begin < values.length; begin += length, number++) {
      batches[number] ??= {};
      batches[number][row.name] = values.slice(begin, begin + length);
    }
  }
  return { manifest, parameters, batches, train: new Uint8Array(await read("graphs/train.onnx")) };
}

export const elementsOf = (shape) => shape.reduce((product, size) => product * size, 1);

/** Answer messages. open: returns a function that does step number k with a learning rate and resolves to its loss. */
export function answer(open) {
  let step;
  let done = 0;
  const actions = {
    open: async (message) => {
      step = await open(message, await readBundle(message.folder, message.examples));
    },
    steps: async ({ count, lr }) => {
      let loss = 0;
      const begin = performance.now();
      for (let number = 0; number < count; number++) loss = await step(done++, lr);
      return { loss, milliseconds: performance.now() - begin };
    },
  };
  addEventListener("message", async ({ data }) => {
    try {
      postMessage({ found: await actions[data.do](data) });
    } catch (error) {
      postMessage({ error: String(error?.stack ?? error) });
    }
  });
}
