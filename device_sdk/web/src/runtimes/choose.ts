/** Which engine trains a bundle on this device: measured once with real steps of the bundle, and remembered. */

import type { Store } from "../storage/store.ts";
import { type Engine, type EngineName, isEngineName } from "./engine.ts";
import { StoppedError } from "./errors.ts";
import { VERSION } from "./files.ts";
import { startWasm } from "./wasm.ts";
import { hasGpu, startWebgpu } from "./webgpu.ts";

/** The key of what was found, of the last bundles. */
const KEY = "runtime";
const REMEMBERED = 8;
/** Milliseconds of steps that each engine is measured for, and most of them that it may take to be ready. */
const MEASURED = 1000;
const READY = 20_000;
/** Steps after which the models are compared. */
const COMPARED = 2;
/** The largest difference of an element from what one thread computes. */
const TOLERANCE = 1e-4;
/** An engine that needs more of a device is taken where it needs less than this part of the time. */
const WORTHWHILE = 0.85;
/** More threads than this bring little, and cost energy. */
const MOST_THREADS = 4;

export interface Finding {
  readonly engine: EngineName;
  /** For people. */
  readonly why: string;
}
/** What a page decides of engines. */
export interface RuntimeOptions {
  /** Train with this engine. Left out: with the quickest, measured once for each bundle. */
  readonly runtime?: EngineName;
  /** Where the files of onnxruntime-web are: an address, relative to this script. Left out: beside it. */
  readonly runtimeFiles?: string;
}

/** Some steps from the same model, for a measurement. */
export interface Trial {
  /** Do one step. */
  step(): Promise<void>;
  /** Return the model. */
  parameters(): Promise<Float32Array>;
  close(): Promise<void>;
}

/** Start an engine. Rejects with an Error where it cannot be. */
export function startEngine(name: EngineName, folder?: string): Promise<Engine> {
  return name === "webgpu" ? startWebgpu(folder) : startWasm(name, folder);
}

/** Return what a device that trains with this engine states as its `runtime`. */
export function runtimeName(engine: EngineName): string {
  return `onnx ${VERSION} web ${engine}`;
}

/** Return the engines that this device may have, from the one that needs least; and why others are not among them. */
export async function candidates(): Promise<{ engines: EngineName[]; without: string[] }> {
  const engines: EngineName[] = ["wasm"];
  const without: string[] = [];
  const { crossOriginIsolated, navigator } = globalThis;
  const cores = navigator?.hardwareConcurrency ?? 1;
  if (!crossOriginIsolated) without.push("no threads: the page is not cross-origin isolated");
  else if (cores < 2) without.push("no threads: one core");
  else {
    const numbers = new Set([2, Math.min(cores, MOST_THREADS)]);
    engines.push(...[...numbers].map((threads): EngineName => `wasm, ${threads} threads`));
  }
  if (await hasGpu().catch(() => false)) engines.push("webgpu");
  else without.push("no GPU");
  return { engines, without };
}

/**
 * Return the engine that trains a bundle quickest here, as it was remembered or is measured now.
 *
 * bundle: its SHA-256. open: begins a trial on an engine. An engine that fails, or whose numbers differ from one thread's
 * by more than 1e-4 after two steps, is not taken. Rejects as `open` does where one thread cannot train it.
 */
export async function chooseRuntime(
  bundle: string,
  store: Store,
  open: (engine: Engine) => Promise<Trial>,
  { runtimeFiles }: RuntimeOptions = {},
): Promise<Finding> {
  const findings = await remembered(store);
  const before = findings.find((finding) => finding.bundle === bundle && finding.browser === browser());
  if (before !== undefined) return before;
  const { engines, without } = await candidates();
  if (engines.length === 1) return { engine: "wasm", why: `there is no other here (${without.join("; ")})` };
  // If a measurement ends the page, it is not tried again.
  await rememberRuntime(bundle, store, { engine: "wasm", why: "a measurement of the others did not end" });
  try {
    const finding = await measured(engines, without, open, runtimeFiles);
    await rememberRuntime(bundle, store, finding);
    return finding;
  } catch (error) {
    await writeFindings(store, findings); // it is measured again at the next task
    throw error;
  }
}

/** Return the engine that was last found best in this browser: `wasm` where none was. */
export async function lastChosen(store: Store): Promise<EngineName> {
  return (await remembered(store)).find((finding) => finding.browser === browser())?.engine ?? "wasm";
}

/** Remember which engine trains a bundle in this browser. */
export async function rememberRuntime(bundle: string, store: Store, { engine, why }: Finding): Promise<void> {
  const others = (await remembered(store)).filter((finding) => finding.bundle !== bundle);
  await writeFindings(store, [{ bundle, browser: browser(), engine, why }, ...others].slice(0, REMEMBERED));
}

function writeFindings(store: Store, findings: readonly Remembered[]): Promise<void> {
  return store.write({ [KEY]: new TextEncoder().encode(JSON.stringify(findings)) }, false);
}

type Remembered = Finding & { readonly bundle: string; readonly browser: string };

async function remembered(store: Store): Promise<Remembered[]> {
  const content = await store.read(KEY);
  try {
    const parsed: unknown = JSON.parse(new TextDecoder().decode(content));
    return Array.isArray(parsed) ? parsed.filter((one) => isEngineName(one?.engine)) : [];
  } catch {
    return []; // it is measured again
  }
}

/** What a finding depends on beside the bundle. */
function browser(): string {
  const { navigator, crossOriginIsolated } = globalThis;
  return [VERSION, navigator?.userAgent, navigator?.hardwareConcurrency, crossOriginIsolated === true].join("; ");
}

async function measured(
  engines: readonly EngineName[],
  without: readonly string[],
  open: (engine: Engine) => Promise<Trial>,
  folder?: string,
): Promise<Finding> {
  let reference: Float32Array | null = null;
  let best: { engine: EngineName; milliseconds: number } | null = null;
  const said: string[] = [];
  for (const name of engines) {
    try {
      const { milliseconds, parameters } = await tried(name, open, folder);
      reference ??= parameters;
      const difference = largestDifference(parameters, reference);
      if (!(difference <= TOLERANCE)) {
        said.push(`${name} computes something else (by ${difference.toPrecision(2)})`);
        continue;
      }
      said.push(`${name} ${milliseconds.toPrecision(3)} ms a step`);
      if (best === null || milliseconds < WORTHWHILE * best.milliseconds) best = { engine: name, milliseconds };
    } catch (error) {
      if (reference === null || error instanceof StoppedError) throw error;
      said.push(`${name} failed: ${(error as Error).message}`);
    }
  }
  return { engine: best!.engine, why: [...said, ...without].join("; ") };
}

/** Return the milliseconds of the quickest step, and the model after two. */
async function tried(
  name: EngineName,
  open: (engine: Engine) => Promise<Trial>,
  folder?: string,
): Promise<{ milliseconds: number; parameters: Float32Array }> {
  const engine = await within(startEngine(name, folder), READY);
  try {
    const trial = await open(engine);
    try {
      for (let step = 0; step < COMPARED; step++) await within(trial.step(), READY);
      const parameters = await trial.parameters();
      let milliseconds = Number.POSITIVE_INFINITY;
      const until = performance.now() + MEASURED;
      // The browser compiles what runs often once more, so early steps say little.
      while (performance.now() < until) {
        const begin = performance.now();
        await within(trial.step(), READY);
        milliseconds = Math.min(milliseconds, performance.now() - begin);
      }
      return { milliseconds, parameters };
    } finally {
      await trial.close();
    }
  } finally {
    engine.close();
  }
}

function largestDifference(found: Float32Array, expected: Float32Array): number {
  return found.reduce((largest, value, place) => {
    const difference = Math.abs(value - expected[place]!);
    return Math.max(difference, largest); // NaN stays
  }, 0);
}

/** Reject where it takes longer: a GPU that is lost may never answer. */
async function within<T>(promise: Promise<T>, milliseconds: number): Promise<T> {
  let timer: ReturnType<typeof setTimeout> | undefined;
  const late = new Promise<never>((_, reject) => {
    timer = setTimeout(() => reject(new Error(`no answer within ${milliseconds / 1000} s`)), milliseconds);
  });
  try {
    return await Promise.race([promise, late]);
  } finally {
    clearTimeout(timer);
  }
}
