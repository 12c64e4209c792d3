import { readFileSync } from "node:fs";
import { afterEach, expect, test, vi } from "vitest";
import {
  candidates,
  chooseRuntime,
  lastChosen,
  rememberRuntime,
  runtimeName,
  startEngine,
  type Trial,
} from "../../src/runtimes/choose.ts";
import { type Engine, isEngineName, threadsOf } from "../../src/runtimes/engine.ts";
import { StoppedError } from "../../src/runtimes/errors.ts";
import { importFile, VERSION } from "../../src/runtimes/files.ts";
import { MemoryStore } from "../../src/storage/store.ts";

afterEach(() => vi.unstubAllGlobals());

/** As in a page that may have threads, on a machine with `cores` cores. */
function isolated(cores: number): void {
  vi.stubGlobal("crossOriginIsolated", true);
  vi.stubGlobal("navigator", { hardwareConcurrency: cores, userAgent: "a browser" });
}

/** A trial whose steps take this long, and which ends with this model. */
function trial(milliseconds: number, ...model: number[]): Trial {
  return {
    step: () => new Promise((resolve) => setTimeout(resolve, milliseconds)),
    parameters: async () => Float32Array.from(model),
    close: async () => {},
  };
}

test("the version is the package's", () => {
  const { dependencies } = JSON.parse(readFileSync(new URL("../../package.json", import.meta.url), "utf8"));
  expect(dependencies["onnxruntime-web"]).toBe(VERSION);
  expect(runtimeName("wasm, 4 threads")).toBe(`onnx ${VERSION} web wasm, 4 threads`);
});

test("names of engines", () => {
  expect(["wasm", "wasm, 2 threads", "wasm, 64 threads", "webgpu"].every(isEngineName)).toBe(true);
  expect(["wasm, 1 threads", "wasm, 65 threads", "cuda", "", null].some(isEngineName)).toBe(false);
  expect(threadsOf("wasm")).toBe(1);
  expect(threadsOf("wasm, 16 threads")).toBe(16);
});

test("a page that is not isolated has one thread", async () => {
  const without = ["no threads: the page is not cross-origin isolated", "no GPU"];
  expect(await candidates()).toEqual({ engines: ["wasm"], without });
  const finding = await chooseRuntime("a", new MemoryStore(), async () => expect.unreachable());
  expect(finding.engine).toBe("wasm");
  expect(finding.why).toContain("no GPU");
});

test("an isolated page may have threads, at most four", async () => {
  isolated(8);
  expect((await candidates()).engines).toEqual(["wasm", "wasm, 2 threads", "wasm, 4 threads"]);
  isolated(2);
  expect((await candidates()).engines).toEqual(["wasm", "wasm, 2 threads"]);
  isolated(1);
  expect(await candidates()).toEqual({ engines: ["wasm"], without: ["no threads: one core", "no GPU"] });
});

test("a GPU is one that the processor does not compute", async () => {
  for (const [info, has] of [
    [{}, true],
    [{ isFallbackAdapter: true }, false],
  ] as const) {
    const gpu = { requestAdapter: async () => ({ info }) };
    vi.stubGlobal("navigator", { hardwareConcurrency: 1, gpu });
    expect((await candidates()).engines).toEqual(has ? ["wasm", "webgpu"] : ["wasm"]);
  }
});

test("the quickest is chosen and remembered, for each bundle", async () => {
  isolated(2);
  const store = new MemoryStore();
  const open = vi.fn(async ({ name }: Engine) => trial(name === "wasm" ? 40 : 10, 1, 2));
  const finding = await chooseRuntime("a", store, open);
  expect(finding.engine).toBe("wasm, 2 threads");
  expect(finding.why).toMatch(/^wasm \d+\.\d+ ms a step; wasm, 2 threads \d+\.\d+ ms a step; no GPU$/);
  expect(open).toHaveBeenCalledTimes(2);
  expect(await chooseRuntime("a", store, open)).toMatchObject(finding);
  expect(open).toHaveBeenCalledTimes(2);
  expect(await lastChosen(store)).toBe("wasm, 2 threads");
  isolated(1);
  expect(await lastChosen(store)).toBe("wasm"); // another device has the browser's data
});

test("what is little quicker is not worth its energy", async () => {
  isolated(2);
  const finding = await chooseRuntime("a", new MemoryStore(), async () => trial(20, 1));
  expect(finding.engine).toBe("wasm");
});

test.each([
  ["other numbers", 1.001, /computes something else \(by 0\.0010\)/],
  ["no numbers", Number.NaN, /computes something else \(by NaN\)/],
])("an engine with %s is not taken", async (_, value, why) => {
  isolated(2);
  const finding = await chooseRuntime("a", new MemoryStore(), async ({ name }) =>
    name === "wasm" ? trial(40, 1) : trial(5, value),
  );
  expect(finding).toMatchObject({ engine: "wasm", why: expect.stringMatching(why) });
});

test("an engine that fails is not taken", async () => {
  isolated(2);
  const finding = await chooseRuntime("a", new MemoryStore(), async ({ name }) => {
    if (name !== "wasm") throw new Error("no such kernel");
    return trial(5, 1);
  });
  expect(finding).toMatchObject({ engine: "wasm", why: expect.stringContaining("failed: no such kernel") });
});

test("a measurement that was stopped is done again, one that ended the page is not", async () => {
  isolated(2);
  const store = new MemoryStore();
  const stopped = chooseRuntime("a", store, async () => {
    throw new StoppedError("training was stopped");
  });
  await expect(stopped).rejects.toThrow(StoppedError);
  await new Promise<void>((resolve) => {
    chooseRuntime("a", store, () => new Promise(() => resolve())); // the page is gone while it is measured
  });
  const finding = await chooseRuntime("a", store, async () => expect.unreachable());
  expect(finding).toMatchObject({ engine: "wasm", why: "a measurement of the others did not end" });
});

test("findings of eight bundles are kept, and damage is no harm", async () => {
  const store = new MemoryStore();
  for (let bundle = 0; bundle < 10; bundle++) await rememberRuntime(`${bundle}`, store, { engine: "webgpu", why: "" });
  expect(JSON.parse(new TextDecoder().decode(await store.read("runtime")))).toHaveLength(8);
  await store.write({ runtime: new TextEncoder().encode('[{"engine": "abacus"}, 3, null]') });
  expect(await lastChosen(store)).toBe("wasm");
  await store.write({ runtime: new TextEncoder().encode("{") });
  expect(await lastChosen(store)).toBe("wasm");
});

test("a file that is not there is named", async () => {
  await expect(importFile("ort-wasm.mjs", "file:///nowhere/")).rejects.toThrow(
    /nowhere\/ort-wasm\.mjs of onnxruntime-web/,
  );
});

test("values come back as they were written", async () => {
  const engine = await startEngine("wasm");
  const value = engine.value("int64", [2]);
  value.write(BigInt64Array.of(-1n, 2n ** 62n));
  expect(await value.read()).toEqual(BigInt64Array.of(-1n, 2n ** 62n));
  value.free();
  await expect(engine.open(new Uint8Array([1, 2, 3]))).rejects.toThrow(/protobuf|parse|model/i);
  engine.close();
});
