/** What computes graphs: onnxruntime-web on the processor (wasm.ts), or on a GPU (webgpu.ts). */

import type { Input } from "../protocol/manifest.ts";
import type { Column, Numbers } from "./columns.ts";

export type DType = Input["dtype"];
export type Values = Readonly<Record<string, Value>>;

/** A tensor in the engine's own memory. It stays there from one run to the next. */
export interface Value {
  /** Copy these numbers into it, in row-major order: of its dtype, and as many as its shape takes. */
  write(values: Numbers): void;
  /** Return a copy. */
  read(): Promise<Numbers>;
  free(): void;
}

export interface Graph {
  readonly inputs: readonly string[];
  readonly outputs: readonly string[];
  /**
   * Run the graph once. outputs: where outputs are written; none of them may be an input too. scalars: outputs of one
   * element. Returns these, in order. Rejects with an Error that says what the runtime says.
   */
  run(inputs: Values, outputs: Values, scalars: readonly string[]): Promise<number[]>;
  /** Run the graph once, and return a copy of all its outputs by name. Rejects with an Error that says what the runtime
   * says. */
  compute(inputs: Values): Promise<Record<string, Column>>;
  close(): Promise<void>;
}

export interface Opening {
  /** What the graph refers to, by name. */
  readonly files?: Readonly<Record<string, Uint8Array>>;
  /** Outputs that a later run takes as inputs. */
  readonly kept?: readonly string[];
}

export interface Engine {
  readonly name: EngineName;
  /** Load a graph. Rejects with an Error that says what the runtime says. */
  open(model: Uint8Array, opening?: Opening): Promise<Graph>;
  /** Return room for a tensor. Throws an Error where there is none. */
  value(dtype: DType, shape: readonly number[]): Value;
  /** Give all memory back. The engine, its graphs and its values are not used afterwards. */
  close(): void;
}

/** `wasm` has one thread. */
export type EngineName = "wasm" | `wasm, ${number} threads` | "webgpu";

const NAME = /^(wasm(, ([2-9]|[1-5][0-9]|6[0-4]) threads)?|webgpu)$/;

export function isEngineName(text: unknown): text is EngineName {
  return typeof text === "string" && NAME.test(text);
}

/** Return the engine's threads: 1 where its name says nothing of them. */
export function threadsOf(name: EngineName): number {
  return Number(/[0-9]+/.exec(name)?.[0] ?? 1);
}
