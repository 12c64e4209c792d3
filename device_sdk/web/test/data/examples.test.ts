import { expect, test, vi } from "vitest";
import { collectExamples, type Example } from "../../src/data/examples.ts";
import { Device } from "../../src/device.ts";
import { MemoryStore } from "../../src/storage/store.ts";
import { DataError } from "../../src/training/errors.ts";

const pair = (a: number, b: number): Float32Array => Float32Array.of(a, b);

test("an async iterator's examples become arrays", async () => {
  const one = new Float32Array(2); // a source may use one array again and again
  async function* source(): AsyncGenerator<Example> {
    for (let n = 0; n < 3; n++) {
      one.fill(n);
      yield { x: one, y: n, image: { values: Uint8Array.of(n, n), shape: [1, 2] } };
    }
  }
  expect(await collectExamples(source())).toEqual({
    x: { values: Float32Array.of(0, 0, 1, 1, 2, 2), shape: [3, 2] },
    y: { values: Int32Array.of(0, 1, 2), shape: [3] },
    image: { values: Uint8Array.of(0, 0, 1, 1, 2, 2), shape: [3, 1, 2] },
  });
});

test.each([
  ["integers", [1, -2], Int32Array.of(1, -2)],
  ["one that is none", [1, 0.5], Float64Array.of(1, 0.5)],
  ["large ones", [1, 2 ** 31], Float64Array.of(1, 2 ** 31)],
  ["not a number", [Number.NaN], Float64Array.of(Number.NaN)],
  ["one of them a bigint", [1n, 2 ** 40], BigInt64Array.of(1n, 2n ** 40n)],
])("numbers find their array: %s", async (_, numbers, values) => {
  const found = await collectExamples(numbers.map((y) => ({ y })));
  expect(found).toEqual({ y: { values, shape: [numbers.length] } });
});

test.each([
  ["none", [], "there are no examples; expected at least one"],
  ["other names", [{ x: 1 }, { x: 1, y: 2 }], "example 1 has the arrays ['x', 'y']; example 0 has ['x']"],
  [
    "a missing one",
    [
      { x: 1, y: 2 },
      { x: 1, z: 2 },
    ],
    "example 1 has the arrays ['x', 'z']; example 0 has ['x', 'y']",
  ],
  ["another shape", [{ x: pair(1, 2) }, { x: 1 }], "array x has shape () in example 1; it has (2,) in example 0"],
  [
    "another dtype",
    [{ x: pair(1, 2) }, { x: Float64Array.of(1, 2) }],
    "array x has dtype float64 in example 1; it has float32 in example 0",
  ],
  [
    "another number of values",
    [{ x: { values: pair(1, 2), shape: [3] } }],
    "array x has 2 values in example 0; its shape (3,) takes 3",
  ],
])("examples that do not fit each other are refused: %s", async (_, examples, words) => {
  const refused = collectExamples(examples as Example[]);
  await expect(refused).rejects.toThrow(words);
  await expect(refused).rejects.toBeInstanceOf(DataError);
});

test("an endless source is stopped at the bound, and told so", async () => {
  const ended = vi.fn();
  async function* endless(): AsyncGenerator<Example> {
    try {
      for (;;) yield { x: pair(1, 2), y: 1 }; // 16 bytes
    } finally {
      ended();
    }
  }
  const words = "the examples take more than 1600 bytes (mostBytes) with example 100 (the first is 0): give fewer";
  await expect(collectExamples(endless(), { mostBytes: 1600 })).rejects.toThrow(words);
  expect(ended).toHaveBeenCalledOnce();
});

test("the bound is 128 MiB where no other is given", async () => {
  const image = new Uint8Array(2 ** 24);
  const examples = Array<Example>(9).fill({ x: image });
  await expect(collectExamples(examples)).rejects.toThrow("more than 128 MiB (mostBytes) with example 8 ");
});

test("a device takes examples; what is wrong with them ends serve", async () => {
  async function* source(): AsyncGenerator<Example> {
    yield { x: 1 };
    throw new Error("the sensor broke");
  }
  const url = "ws://127.0.0.1:1";
  const broken = new Device({ url, data: source(), store: new MemoryStore() });
  await expect(broken.serve()).rejects.toThrow("the sensor broke");
  const none = new Device({ url, data: [], store: new MemoryStore() });
  await expect(none.serve()).rejects.toThrow("there are no examples");
  const good = new Device({ url, data: [{ x: 1 }], store: new MemoryStore() });
  good.stop();
  await good.serve();
});
