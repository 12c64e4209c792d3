/**
 * onnxruntime-web's WebAssembly on the processor, driven by the functions that it exports.
 *
 * The package's own `InferenceSession` copies each input into WebAssembly's memory, and each output out again, at each run.
 * Here tensors stay in that memory: a step moves its batch and its loss alone.
 */

import type { Column, Numbers } from "./columns.ts";
import {
  type DType,
  type Engine,
  type EngineName,
  type Graph,
  type Opening,
  threadsOf,
  type Value,
  type Values,
} from "./engine.ts";
import { importFile, WASM } from "./files.ts";

/** What is used of what the package's WebAssembly exports. Pointers are numbers; a result that is not 0 is an error. */
interface Exports {
  readonly HEAPU8: Uint8Array;
  getValue(pointer: number, type: "i32" | "*"): number;
  setValue(pointer: number, value: number, type: "i32" | "*"): void;
  stackSave(): number;
  stackAlloc(bytes: number): number;
  stackRestore(stack: number): void;
  lengthBytesUTF8(text: string): number;
  stringToUTF8(text: string, pointer: number, bytes: number): void;
  UTF8ToString(pointer: number): string;
  mountExternalData(path: string, content: Uint8Array): void;
  unmountExternalData(): void;
  _malloc(bytes: number): number;
  _free(pointer: number): void;
  _OrtInit(threads: number, logLevel: number): number;
  _OrtGetLastError(code: number, message: number): number;
  _OrtCreateSessionOptions(...options: number[]): number;
  _OrtReleaseSessionOptions(options: number): number;
  _OrtCreateSession(model: number, bytes: number, options: number): number | Promise<number>;
  _OrtReleaseSession(session: number): number;
  _OrtGetInputOutputCount(session: number, inputs: number, outputs: number): number;
  _OrtGetInputOutputMetadata(session: number, place: number, name: number, metadata: number): number;
  _OrtFree(pointer: number): number;
  _OrtCreateTensor(type: number, data: number, bytes: number, shape: number, rank: number, location: number): number;
  _OrtGetTensorData(tensor: number, type: number, data: number, shape: number, rank: number): number;
  _OrtReleaseTensor(tensor: number): number;
  _OrtRun(session: number, ...arrays: number[]): number | Promise<number>;
}

const POINTER = 4;
const FATAL = 4; // the log level
const ALL_OPTIMIZATIONS = 99;
const ON_PROCESSOR = 1;
/** The numbers of ONNX's types, and the arrays that hold them. */
const TYPES = {
  float32: [1, Float32Array],
  uint8: [2, Uint8Array],
  int32: [6, Int32Array],
  int64: [7, BigInt64Array],
  bool: [9, Uint8Array],
  float64: [11, Float64Array],
} as const satisfies Record<DType, unknown>;

/** Load the WebAssembly. folder: where its files are. Rejects with an Error that says what to do. */
export async function startWasm(name: EngineName, folder?: string): Promise<Engine> {
  const { default: start } = await importFile(WASM, folder);
  const numThreads = threadsOf(name);
  const [exports, workers] = await collectingWorkers<Exports>(() => start({ numThreads }));
  const memory = new Memory(exports);
  memory.check(exports._OrtInit(numThreads, FATAL));
  return {
    name,
    open: (model, opening = {}) => WasmGraph.open(memory, model, opening),
    value: (dtype, shape) => new WasmValue(memory, dtype, shape),
    close: () => {
      for (const worker of workers) worker.terminate();
    },
  };
}

/** Return what `start` resolves to, and the workers that it started: its threads, which nothing else could end. */
async function collectingWorkers<T>(start: () => Promise<T>): Promise<[T, Worker[]]> {
  const workers: Worker[] = [];
  const Plain = globalThis.Worker as typeof Worker | undefined;
  if (Plain === undefined) return [await start(), workers];
  globalThis.Worker = class extends Plain {
    constructor(url: string | URL, options?: WorkerOptions) {
      super(url, options);
      workers.push(this);
    }
  };
  try {
    return [await start(), workers];
  } finally {
    globalThis.Worker = Plain;
  }
}

/** WebAssembly's memory. */
class Memory {
  readonly exports: Exports;

  constructor(exports: Exports) {
    this.exports = exports;
  }

  /** Throw the runtime's last error unless the code is 0. */
  check(code: number): void {
    if (code !== 0) this.fail();
  }

  /** Throw the runtime's last error. */
  fail(): never {
    const text = this.onStack(2, (place) => {
      this.exports._OrtGetLastError(place, place + POINTER);
      return this.exports.UTF8ToString(this.pointer(place + POINTER));
    });
    throw new Error(text);
  }

  /** Return the bytes of a place. What is written to them is written to the memory, until it grows. */
  bytes(pointer: number, length: number): Uint8Array {
    this.exports.getValue(0, "i32"); // makes HEAPU8 again after another thread made the memory larger
    return this.exports.HEAPU8.subarray(pointer, pointer + length);
  }

  pointer(place: number): number {
    return this.exports.getValue(place, "*") >>> 0;
  }

  /** Return room on the heap. Throws an Error where there is none. */
  allocate(bytes: number): number {
    const pointer = this.exports._malloc(Math.max(bytes, 1)) >>> 0;
    if (pointer === 0) throw new Error(`out of memory: there is no room for ${bytes} bytes`);
    return pointer;
  }

  /** Return the place of a copy of these bytes. */
  copied(content: Uint8Array): number {
    const pointer = this.allocate(content.length);
    this.bytes(pointer, content.length).set(content);
    return pointer;
  }

  /** Return the place of a text. */
  text(text: string): number {
    const length = this.exports.lengthBytesUTF8(text) + 1;
    const pointer = this.allocate(length);
    this.exports.stringToUTF8(text, pointer, length);
    return pointer;
  }

  /** Call `act` with the place of this many words on the stack. */
  onStack<T>(words: number, act: (place: number) => T): T {
    const stack = this.exports.stackSave();
    try {
      return act(this.exports.stackAlloc(POINTER * Math.max(words, 1)));
    } finally {
      this.exports.stackRestore(stack);
    }
  }

  writeWords(place: number, words: readonly number[]): void {
    for (const [index, word] of words.entries()) this.exports.setValue(place + POINTER * index, word, "i32");
  }
}

class WasmValue implements Value {
  /** ONNX Runtime's tensor, whose elements are at `#data`. */
  readonly tensor: number;
  readonly #memory: Memory;
  readonly #data: number;
  readonly #length: number;
  readonly #type: (typeof TYPES)[DType];

  constructor(memory: Memory, dtype: DType, shape: readonly number[]) {
    this.#memory = memory;
    this.#type = TYPES[dtype];
    this.#length = shape.reduce((product, size) => product * size, 1) * this.#type[1].BYTES_PER_ELEMENT;
    this.#data = memory.allocate(this.#length);
    this.tensor = memory.onStack(shape.length, (place) => {
      memory.writeWords(place, shape);
      const { exports } = memory;
      return exports._OrtCreateTensor(this.#type[0], this.#data, this.#length, place, shape.length, ON_PROCESSOR);
    });
    if (this.tensor === 0) memory.fail();
  }

  write(values: Numbers): void {
    const content = new Uint8Array(values.buffer, values.byteOffset, values.byteLength);
    this.#memory.bytes(this.#data, this.#length).set(content);
  }

  async read(): Promise<Numbers> {
    return new this.#type[1](this.#memory.bytes(this.#data, this.#length).slice().buffer as ArrayBuffer);
  }

  free(): void {
    this.#memory.exports._OrtReleaseTensor(this.tensor);
    this.#memory.exports._free(this.#data);
  }
}

class WasmGraph implements Graph {
  readonly #memory: Memory;
  readonly #session: number;
  /** The place of each name in the memory. */
  readonly #inputs: ReadonlyMap<string, number>;
  readonly #outputs: ReadonlyMap<string, number>;

  private constructor(memory: Memory, session: number) {
    this.#memory = memory;
    this.#session = session;
    const { exports } = memory;
    const [inputs, outputs] = memory.onStack(2, (place) => {
      memory.check(exports._OrtGetInputOutputCount(session, place, place + POINTER));
      return [memory.pointer(place), memory.pointer(place + POINTER)];
    });
    const names = Array.from({ length: inputs! + outputs! }, (_, number) =>
      memory.onStack(2, (place): [string, number] => {
        memory.check(exports._OrtGetInputOutputMetadata(session, number, place, place + POINTER));
        exports._OrtFree(memory.pointer(place + POINTER));
        return [exports.UTF8ToString(memory.pointer(place)), memory.pointer(place)];
      }),
    );
    this.#inputs = new Map(names.slice(0, inputs));
    this.#outputs = new Map(names.slice(inputs));
  }

  static async open(memory: Memory, model: Uint8Array, { files = {} }: Opening): Promise<WasmGraph> {
    const { exports } = memory;
    // With the arena, without the plan of each run's memory (which takes more), sequential, without a profile or a name.
    const options = exports._OrtCreateSessionOptions(ALL_OPTIMIZATIONS, 1, 0, 0, 0, 0, 0, FATAL, 0, 0);
    if (options === 0) memory.fail();
    const content = memory.copied(model);
    for (const [path, file] of Object.entries(files)) exports.mountExternalData(path, file);
    try {
      const session = await exports._OrtCreateSession(content, model.length, options);
      if (session === 0) memory.fail();
      return new WasmGraph(memory, session);
    } finally {
      exports.unmountExternalData();
      exports._free(content);
      exports._OrtReleaseSessionOptions(options);
    }
  }

  get inputs(): readonly string[] {
    return [...this.#inputs.keys()];
  }

  get outputs(): readonly string[] {
    return [...this.#outputs.keys()];
  }

  async run(inputs: Values, outputs: Values, scalars: readonly string[]): Promise<number[]> {
    const made = await this.#run(inputs, outputs, scalars);
    return made.map((tensor) => Number(this.#taken(tensor).values[0]));
  }

  async compute(inputs: Values): Promise<Record<string, Column>> {
    const names = this.outputs;
    const made = await this.#run(inputs, {}, names);
    return Object.fromEntries(made.map((tensor, place) => [names[place]!, this.#taken(tensor)]));
  }

  /** Run the graph once. Returns the tensors of the outputs that no place was prepared for (`others`). */
  async #run(inputs: Values, outputs: Values, others: readonly string[]): Promise<number[]> {
    const { exports } = this.#memory;
    const names = [...Object.keys(outputs), ...others];
    // Names of inputs, inputs, names of outputs, outputs. An output without a place, 0, gets one from the runtime.
    const arrays = [
      Object.keys(inputs).map((name) => this.#inputs.get(name)!),
      Object.values(inputs).map((value) => (value as WasmValue).tensor),
      names.map((name) => this.#outputs.get(name)!),
      [...Object.values(outputs).map((value) => (value as WasmValue).tensor), ...others.map(() => 0)],
    ];
    const stack = exports.stackSave();
    try {
      const places = arrays.map((words) => {
        const pointer = exports.stackAlloc(POINTER * Math.max(words.length, 1));
        this.#memory.writeWords(pointer, words);
        return pointer as number;
      }) as [number, number, number, number];
      const [inputNames, inputTensors, outputNames, outputTensors] = places;
      const count = arrays[0]!.length;
      this.#memory.check(
        await exports._OrtRun(
          this.#session,
          inputNames,
          inputTensors,
          count,
          outputNames,
          names.length,
          outputTensors,
          0,
        ),
      );
      const first = outputTensors + POINTER * (names.length - others.length);
      return others.map((_, number) => this.#memory.pointer(first + POINTER * number));
    } finally {
      exports.stackRestore(stack);
    }
  }

  async close(): Promise<void> {
    const { exports } = this.#memory;
    for (const name of [...this.#inputs.values(), ...this.#outputs.values()]) exports._OrtFree(name);
    exports._OrtReleaseSession(this.#session);
  }

  /** Return a copy of a tensor that the runtime made, and release it. */
  #taken(tensor: number): Column {
    const { exports } = this.#memory;
    const { type, data, shape } = this.#memory.onStack(4, (place) => {
      const [second, third, fourth] = [place + POINTER, place + 2 * POINTER, place + 3 * POINTER];
      this.#memory.check(exports._OrtGetTensorData(tensor, place, second, third, fourth));
      const [sizes, rank] = [this.#memory.pointer(third), this.#memory.pointer(fourth)];
      const shape = Array.from({ length: rank }, (_, axis) => this.#memory.pointer(sizes + POINTER * axis));
      exports._OrtFree(sizes);
      return { type: this.#memory.pointer(place), data: this.#memory.pointer(second), shape };
    });
    try {
      const known = Object.values(TYPES).find(([number]) => number === type);
      if (known === undefined) throw new Error(`an output has ONNX's element type ${type}; expected one of a bundle's`);
      const length = shape.reduce((product, size) => product * size, 1);
      const bytes = this.#memory.bytes(data, length * known[1].BYTES_PER_ELEMENT).slice();
      return { values: new known[1](bytes.buffer as ArrayBuffer), shape };
    } finally {
      exports._OrtReleaseTensor(tensor);
    }
  }
}
