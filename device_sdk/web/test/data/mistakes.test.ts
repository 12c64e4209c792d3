/** Mistakes in a device's data, in the Python SDK's words: tests/device_sdk/data_mistakes.json holds both to them. */

import { readFileSync } from "node:fs";
import { expect, test } from "vitest";
import type { Input } from "../../src/protocol/manifest.ts";
import type { Numbers } from "../../src/runtimes/columns.ts";
import { type Columns, examplesOf, FittedData } from "../../src/training/data.ts";
import { DataError } from "../../src/training/errors.ts";

interface Case {
  readonly name: string;
  readonly inputs?: readonly (Pick<Input, "name" | "dtype" | "shape"> & Partial<Input>)[];
  readonly arrays: Readonly<
    Record<string, readonly [keyof typeof KINDS, readonly number[], readonly (number | string)[]]>
  >;
  readonly words: string;
}
const KINDS = {
  float32: (values: number[]) => Float32Array.from(values),
  float64: (values: number[]) => Float64Array.from(values),
  int32: (values: number[]) => Int32Array.from(values),
  int64: (values: number[]) => BigInt64Array.from(values, BigInt),
};
const SPECIAL: Record<string, number> = { nan: Number.NaN, inf: Infinity, "-inf": -Infinity };
const INPUTS: readonly Input[] = [
  { name: "x", dtype: "float32", shape: [2], below: null, ignored: null },
  { name: "y", dtype: "int64", shape: [], below: 3, ignored: -100 },
];
const FILE = new URL("../../../../tests/device_sdk/data_mistakes.json", import.meta.url);
const CASES: readonly Case[] = JSON.parse(readFileSync(FILE, "utf8"));

function complaint({ inputs, arrays }: Case): string | null {
  const given = Object.entries(arrays).map(([name, [dtype, shape, listed]]) => {
    const values: Numbers = KINDS[dtype](listed.map((value) => (typeof value === "string" ? SPECIAL[value]! : value)));
    return [name, { values, shape }] as const;
  });
  const columns: Columns = Object.fromEntries(given);
  try {
    examplesOf(columns); // as Device's constructor does
    const rows = inputs?.map((row) => ({ below: null, ignored: null, ...row }));
    return new FittedData(columns, rows ?? INPUTS).firstNonfinite();
  } catch (error) {
    if (error instanceof DataError) return error.message;
    throw error;
  }
}

test.each(CASES)("$name", (one) => {
  expect(complaint(one)?.slice(0, one.words.length)).toBe(one.words);
});
