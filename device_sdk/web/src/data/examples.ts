/** Examples one by one, from whatever gives them, collected as arrays: training passes over them several times. */

import type { Column, Numbers } from "../runtimes/columns.ts";
import { type Columns, dtypeOf, shownNames, shownShape } from "../training/data.ts";
import { DataError } from "../training/errors.ts";

/** The values of one example in row-major order; its shape has no axis of examples. */
export interface Tensor {
  readonly values: Numbers;
  readonly shape: readonly number[];
}

/** One example's arrays by the manifest's names. A number has the shape (), and a typed array alone the shape (length,). */
export type Example = Readonly<Record<string, number | bigint | Numbers | Tensor>>;
export type Examples = Iterable<Example> | AsyncIterable<Example>;

export interface Bounds {
  /** Most bytes that the examples' values may take. Default: 128 MiB. While they are joined they take twice that. */
  readonly mostBytes?: number;
}

const MOST_BYTES = 128 * 2 ** 20;

/** The values of one array, example after example. */
interface Gathered {
  readonly shape: readonly number[];
  /** null: numbers, for which an array is chosen when all are there. */
  readonly dtype: string | null;
  readonly values: (number | bigint | Numbers)[];
}

/**
 * Return the examples as arrays. An iterator that is endless, or too long, is stopped at `mostBytes`.
 *
 * Rejects with DataError: no examples, examples that differ in names, shapes or dtypes, too many of them; and with what
 * the iterator itself throws.
 */
export async function collectExamples(examples: Examples, { mostBytes = MOST_BYTES }: Bounds = {}): Promise<Columns> {
  const gathered = new Map<string, Gathered>();
  let count = 0;
  let bytes = 0;
  for await (const example of examples) {
    const names = Object.keys(example);
    if (count === 0) for (const name of names) gathered.set(name, begin(example[name]!));
    if (names.length !== gathered.size || !names.every((name) => gathered.has(name))) {
      const [given, first] = [shownNames(names), shownNames([...gathered.keys()])];
      throw new DataError(`example ${count} has the arrays ${given}; example 0 has ${first}`);
    }
    for (const name of names) bytes += add(gathered.get(name)!, example[name]!, name, count);
    if (bytes > mostBytes) {
      throw new DataError(
        `the examples take more than ${shownBytes(mostBytes)} (mostBytes) with example ${count} (the first is 0): give ` +
          "fewer or smaller ones (images of fewer pixels, shorter windows), or let collectExamples take more, if the device has the memory",
      );
    }
    count += 1;
  }
  if (count === 0) throw new DataError("there are no examples; expected at least one");
  return Object.fromEntries([...gathered].map(([name, one]) => [name, join(one, count)]));
}

/** Return whether data are examples one by one, and not arrays. */
export function isExamples(data: Columns | Examples): data is Examples {
  return Symbol.iterator in data || Symbol.asyncIterator in data;
}

function begin(element: Example[string]): Gathered {
  const { values, shape } = tensor(element);
  return { shape, dtype: isNumber(values) ? null : dtypeOf(values), values: [] };
}

/** Add an example's array. Returns the bytes that it takes. */
function add(gathered: Gathered, element: Example[string], name: string, example: number): number {
  const { values, shape } = tensor(element);
  if (shape.join() !== gathered.shape.join()) {
    const [given, first] = [shownShape(shape), shownShape(gathered.shape)];
    throw new DataError(`array ${name} has shape ${given} in example ${example}; it has ${first} in example 0`);
  }
  const dtype = isNumber(values) ? null : dtypeOf(values);
  if (dtype !== gathered.dtype) {
    const [given, first] = [dtype ?? "number", gathered.dtype ?? "number"];
    throw new DataError(`array ${name} has dtype ${given} in example ${example}; it has ${first} in example 0`);
  }
  if (isNumber(values)) {
    gathered.values.push(values);
    return 8;
  }
  const length = shape.reduce((product, axis) => product * axis, 1);
  if (values.length !== length) {
    const takes = `its shape ${shownShape(shape)} takes ${length}`;
    throw new DataError(`array ${name} has ${values.length} values in example ${example}; ${takes}`);
  }
  gathered.values.push(values.slice()); // a source may use one array again and again
  return values.byteLength;
}

function tensor(element: Example[string]): { values: number | bigint | Numbers; shape: readonly number[] } {
  if (isNumber(element)) return { values: element, shape: [] };
  return ArrayBuffer.isView(element) ? { values: element, shape: [element.length] } : (element as Tensor);
}

function isNumber(value: unknown): value is number | bigint {
  return typeof value === "number" || typeof value === "bigint";
}

function join({ shape, values }: Gathered, count: number): Column {
  const whole = [count, ...shape];
  const [first] = values;
  if (isNumber(first)) return { values: joinNumbers(values as (number | bigint)[]), shape: whole };
  const Kind = (first as Numbers).constructor as Float32ArrayConstructor;
  const length = (first as Numbers).length;
  const joined = new Kind(count * length);
  for (let example = 0; example < count; example++) {
    joined.set(values[example] as Float32Array, example * length);
    values[example] = 0; // so that its memory can be had again
  }
  return { values: joined, shape: whole };
}

/** Return numbers as integers, where all are, so that they fit an array of classes; otherwise as doubles. */
function joinNumbers(values: readonly (number | bigint)[]): Numbers {
  if (values.some((value) => typeof value === "bigint")) return BigInt64Array.from(values, BigInt);
  const isInteger = values.every((value) => value === (Number(value) | 0));
  return isInteger ? Int32Array.from(values as number[]) : Float64Array.from(values as number[]);
}

function shownBytes(bytes: number): string {
  return bytes >= 2 ** 20 ? `${(bytes / 2 ** 20).toFixed(0)} MiB` : `${bytes} bytes`;
}
