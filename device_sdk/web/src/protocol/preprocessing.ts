/** What a bundle says of the way from raw data to its batch arrays (PROTOCOL.md, section 15). This SDK reads it, and refuses such bundles. */

import {
  type Check,
  type Checked,
  integer,
  list,
  Mismatch,
  number,
  object,
  oneOf,
  optional,
  record,
  text,
} from "./checks.ts";

const column = text(256, 1);

function leftOut<T>(check: Check<T>): Check<T | undefined> {
  return optional<T | undefined, undefined>(check, undefined);
}

/** An object without other fields: what is not known here would be left out silently. */
function closed<T extends object>(names: readonly string[], check: Check<T>): Check<T> {
  return (value, place) => {
    const checked = check(value, place);
    const other = Object.keys(value as object).find((name) => !names.includes(name));
    if (other !== undefined) throw new Mismatch(`expected no field ${other} at ${place}`);
    return checked;
  };
}

/** The first of several checks that takes the value. */
function either<A, B>(first: Check<A>, second: Check<B>): Check<A | B> {
  return (value, place) => (Array.isArray(value) ? second(value, place) : first(value, place));
}

const numbers = either(number(), list(number(), 65536, 1));
const value: Check<string | number> = (given, place) =>
  typeof given === "string" ? given : integer(-(2 ** 53 - 1))(given, place);
const dtypes = ["float32", "float64", "int64", "int32", "uint8", "bool"] as const;

const OPERATIONS: Record<string, Check<object>> = {
  standardise: closed(
    ["op", "mean", "std", "axis"],
    object({ mean: numbers, std: numbers, axis: optional(integer(-32, 31), -1) }),
  ),
  scale: closed(["op", "factor", "offset"], object({ factor: number(), offset: optional(number(), 0) })),
  clip: closed(["op", "low", "high"], object({ low: number(), high: number() })),
  log: closed(["op", "offset"], object({ offset: optional(number(), 0) })),
  cast: closed(["op", "dtype"], object({ dtype: oneOf(dtypes) })),
  index: closed(["op", "values"], object({ values: list(value, 65536, 1) })),
  one_hot: closed(["op", "classes"], object({ classes: integer(1, 65536) })),
  channels_first: closed(["op"], object({})),
};

const step: Check<object> = (given, place) => {
  const name = (given as { op?: unknown } | null)?.op;
  const operation = typeof name === "string" && Object.hasOwn(OPERATIONS, name) ? OPERATIONS[name] : undefined;
  if (operation === undefined)
    throw new Mismatch(`expected one of ${Object.keys(OPERATIONS).join(", ")} at ${place}.op`);
  const checked = operation(given, place);
  const wrong = wrongStep(checked as Record<string, unknown>);
  if (wrong !== undefined) throw new Mismatch(`${wrong} at ${place}`);
  return checked;
};

const preparation = closed(
  ["columns", "label", "steps"],
  object({
    columns: either(column, list(column, 65536, 1)),
    label: leftOut(oneOf(["last", "majority"])),
    steps: optional(list(step, 64), []),
  }),
);

export const preprocessing = closed(
  ["arrays", "resample", "windows", "streams"],
  object({
    arrays: record(column, preparation, 64, 1),
    resample: leftOut(closed(["time", "rate"], object({ time: column, rate: number(1e-6, 1e9) }))),
    windows: leftOut(closed(["length", "hop"], object({ length: integer(1, 2 ** 20), hop: integer(1, 2 ** 20) }))),
    streams: leftOut(column),
  }),
);
export type Preprocessing = Checked<typeof preprocessing>;

function wrongStep({ low, high, values, mean, std }: Record<string, unknown>): string | undefined {
  if (low !== undefined && (low as number) > (high as number)) return "low above high";
  if (Array.isArray(values)) {
    if (new Set(values).size < values.length) return "a value twice";
    if (new Set(values.map((one) => typeof one)).size > 1) return "texts and numbers";
  }
  if (std !== undefined) {
    const lengths = [mean, std].map((one) => (Array.isArray(one) ? one.length : 1));
    if ([std].flat().includes(0)) return "a std of 0";
    if (lengths[0] !== lengths[1] && !lengths.includes(1)) return `${lengths[0]} means and ${lengths[1]} stds`;
  }
  return undefined;
}

/** Return what is wrong with preprocessing for a bundle with these arrays; undefined: nothing. */
export function contradictionOf(fields: Preprocessing, version: number, batch: readonly string[]): string | undefined {
  if (version < 3) return `preprocessing is in a bundle of version ${version}; it needs version 3`;
  const names = Object.keys(fields.arrays);
  if ([...names].sort().join() !== [...batch].sort().join()) {
    return `preprocessing makes the arrays ${names.join(", ")}; the batch has ${batch.join(", ")}`;
  }
  const labelled = names.find((name) => fields.arrays[name]!.label !== undefined);
  if (labelled !== undefined && fields.windows === undefined) {
    return `array ${labelled} has a label for each window, and there are no windows`;
  }
  return undefined;
}
