/** A device's own data: arrays in memory, checked against the bundle's manifest. */

import { elementsOf, type Input } from "../protocol/manifest.ts";
import type { Column, Numbers } from "../runtimes/columns.ts";
import { DataError } from "./errors.ts";
import { permutation } from "./shuffling.ts";

/** The arrays by the manifest's names. */
export type Columns = Readonly<Record<string, Column>>;

/** One batch: the arrays in the manifest's order, and how many examples they have. */
export interface Batch {
  readonly arrays: readonly Numbers[];
  readonly examples: number;
}

type Dtype = Input["dtype"];
const ARRAYS = {
  float32: Float32Array,
  float64: Float64Array,
  int32: Int32Array,
  uint8: Uint8Array,
  int64: BigInt64Array,
  bool: Uint8Array,
};
const LIMITS: Partial<Record<Dtype, readonly [number, number]>> = {
  int32: [-(2 ** 31), 2 ** 31 - 1],
  uint8: [0, 255],
  bool: [0, 1],
};

/** Return how many examples the arrays have. Throws DataError. */
export function examplesOf(columns: Columns): number {
  const lengths = new Set(Object.values(columns).map((column) => column.shape[0] ?? 0));
  const [examples = 0] = lengths;
  if (lengths.size !== 1 || examples < 1) {
    const shapes = Object.entries(columns).map(([name, { shape }]) => `'${name}': ${shape[0] ?? "None"}`);
    throw new DataError(
      `arrays with these numbers of examples were given: {${shapes.join(", ")}}; expected at least one array, all with ` +
        "the same number of examples along their first axes, at least 1",
    );
  }
  return examples;
}

/** The data in the manifest's order and dtypes. */
export class FittedData {
  readonly inputs: readonly Input[];
  readonly examples: number;
  readonly #arrays: readonly Numbers[];

  /** Throws DataError where the arrays do not fit. */
  constructor(columns: Columns, inputs: readonly Input[]) {
    const names = shownNames(Object.keys(columns));
    if (names !== shownNames(inputs.map((row) => row.name))) {
      throw new DataError(`arrays ${names} were given; expected ${describe(inputs)}`);
    }
    this.inputs = inputs;
    this.examples = examplesOf(columns);
    this.#arrays = inputs.map((row) => fitted(columns[row.name]!, row));
    inputs.forEach((row, place) => {
      checkRange(this.#arrays[place]!, row);
    });
  }

  /** Yield one pass: in the order of (seed, epoch), or of the data where the seed is null. Size 0: one batch. */
  *batches(size: number, seed: number | null, epoch = 0): Generator<Batch> {
    const order = seed === null ? null : permutation(this.examples, seed, epoch);
    const step = size || this.examples;
    for (let begin = 0; begin < this.examples; begin += step) {
      const end = Math.min(begin + step, this.examples);
      const arrays = this.#arrays.map((values, place) => {
        const length = elementsOf(this.inputs[place]!);
        if (order === null) return values.slice(begin * length, end * length) as Numbers;
        return rows(values, length, order.subarray(begin, end));
      });
      yield { arrays, examples: end - begin };
    }
  }

  /** Return what to say of the first NaN or infinity, or null. */
  firstNonfinite(): string | null {
    for (const [place, row] of this.inputs.entries()) {
      const values = this.#arrays[place]!;
      if (!(values instanceof Float32Array || values instanceof Float64Array)) continue;
      const index = (values as Float64Array).findIndex((value) => !Number.isFinite(value));
      if (index >= 0) {
        const value = String(values[index]).toLowerCase().replace("infinity", "inf");
        return `array ${row.name} has the value ${value} in ${example(index, row)}; expected finite numbers`;
      }
    }
    return null;
  }
}

function rows(values: Numbers, length: number, places: Uint32Array): Numbers {
  const Kind = values.constructor as new (size: number) => Float32Array;
  const batch = new Kind(places.length * length);
  places.forEach((place, row) => {
    batch.set((values as Float32Array).subarray(place * length, (place + 1) * length), row * length);
  });
  return batch;
}

/** Return the array in the manifest's dtype; one that is so is not copied. */
function fitted({ values, shape }: Column, row: Input): Numbers {
  if (shape.length === 0 || shape.slice(1).join() !== row.shape.join()) {
    throw new DataError(`array ${row.name} has shape ${shownShape(shape)}; expected ${shownRow(row)}, n examples`);
  }
  const length = elementsOf({ shape });
  if (values.length !== length) {
    throw new DataError(
      `array ${row.name} has ${values.length} values; its shape ${shownShape(shape)} takes ${length}`,
    );
  }
  const Kind = ARRAYS[row.dtype];
  if (values instanceof Kind && row.dtype !== "bool") return values;
  const toFloat = row.dtype === "float32" || row.dtype === "float64";
  if (!toFloat && (values instanceof Float32Array || values instanceof Float64Array)) {
    throw new DataError(
      `array ${row.name} has dtype ${dtypeOf(values)}; expected ${row.dtype}, or one of integers. If its values are right, ` +
        "convert it",
    );
  }
  const limits = LIMITS[row.dtype];
  if (limits !== undefined) checkLimits(values, limits, row);
  if (row.dtype === "float32" && (values as Float64Array).some((value) => becomesInfinite(Number(value)))) {
    throw new DataError(`array ${row.name} has ${dtypeOf(values)} values that are too large for float32`);
  }
  if (Kind === BigInt64Array) return BigInt64Array.from(values as Int32Array, BigInt);
  return (Kind as Float32ArrayConstructor).from(values as Float64Array, Number);
}

function checkLimits(values: Numbers, [least, most]: readonly [number, number], row: Input): void {
  // Comparisons of bigint with number need no conversion.
  let low = values[0]!;
  let high = low;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low < least || high > most) {
    throw new DataError(`array ${row.name} has values from ${low} to ${high}, which do not fit ${row.dtype}`);
  }
}

function becomesInfinite(value: number): boolean {
  return Number.isFinite(value) && !Number.isFinite(Math.fround(value));
}

/** Throw DataError where an integer names no class and no row (`below`). */
function checkRange(values: Numbers, row: Input): void {
  const { below, ignored } = row;
  if (below === null) return;
  const wrong = (value: number | bigint): boolean =>
    (value < 0 || value >= below) && (ignored === null || Number(value) !== ignored);
  const first = (values as Int32Array).findIndex(wrong);
  if (first < 0) return;
  const count = (values as Int32Array).filter(wrong).length;
  const allowed = `0 to ${below - 1}${ignored === null ? "" : `, or ${ignored} for what is left out`}`;
  throw new DataError(
    `array ${row.name} has the value ${values[first]} in ${example(first, row)}; expected ${allowed}. ${count} of its ` +
      `${values.length} values are none of these`,
  );
}

/** Return which example a value is of, and where in the example. */
function example(place: number, row: Input): string {
  const length = elementsOf(row);
  const inside: number[] = [];
  let rest = place % length;
  for (const axis of [...row.shape].reverse()) {
    inside.unshift(rest % axis);
    rest = Math.floor(rest / axis);
  }
  const where = inside.length > 0 ? `, at [${inside.join(", ")}]` : "";
  return `example ${Math.floor(place / length)} (the first is 0)${where}`;
}

/** Return the batch's arrays for people: `x float32 (n, 1, 8, 8), y int64 (n,)`. */
function describe(inputs: readonly Input[]): string {
  return inputs.map((row) => `${row.name} ${row.dtype} ${shownRow(row)}`).join(", ");
}

function shownRow(row: Input): string {
  return `(${["n", ...row.shape].join(", ")}${row.shape.length > 0 ? "" : ","})`;
}

/** Return a shape as numpy shows it: `(3, 2)`, `(3,)`, `()`. */
export function shownShape(shape: readonly number[]): string {
  return `(${shape.join(", ")}${shape.length === 1 ? "," : ""})`;
}

/** Return names as Python shows a sorted list of them: `['x', 'y']`. */
export function shownNames(names: readonly string[]): string {
  const quoted = [...names].sort().map((name) => `'${name}'`);
  return `[${quoted.join(", ")}]`;
}

/** Return numpy's name of the elements' type. */
export function dtypeOf(values: Numbers): string {
  return values.constructor.name.replace("Big", "").replace("Clamped", "").replace("Array", "").toLowerCase();
}
