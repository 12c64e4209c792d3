/** manifest.json: what a training bundle is (PROTOCOL.md, section 15). */

import {
  type Check,
  type Checked,
  flag,
  integer,
  list,
  nullable,
  number,
  object,
  oneOf,
  optional,
  record,
  text,
} from "./checks.ts";
import { BundleError, ProtocolError } from "./errors.ts";
import { checked, digest, name } from "./messages.ts";
import { contradictionOf, preprocessing } from "./preprocessing.ts";

export const MAX_MANIFEST_BYTES = 16 * 2 ** 20;
export const TRAIN = "graphs/train.onnx";
export const EVAL = "graphs/eval.onnx";
export const FROZEN = "graphs/frozen.safetensors";
export const PARAMETERS = "parameters.safetensors";
export const STATE = "state.safetensors";
export const INFER = "graphs/infer.onnx";
const TRAIN_MANY = "graphs/train_many.onnx";
const OF_FEATURES = ["graphs/features.onnx", "graphs/train_from_features.onnx", "graphs/eval_from_features.onnx"];
const ORT_TRAINING = ["training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "checkpoint"];
const FORMAT = "fleetlearn.bundle";
const VERSIONS = [1, 2, 3];
const MAX_ELEMENTS = 2 ** 31;
const PLAIN_NAME = /^[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_-])?$/;

const tensorName = text(256, 1);
const shape = list(integer(1, MAX_ELEMENTS), 32);
const place = integer(0, MAX_ELEMENTS);
const bytes = integer(0, 2 ** 43);

/** A field that is left out where it has no meaning; then it is undefined. */
function leftOut<T>(check: Check<T>): Check<T | undefined> {
  return optional<T | undefined, undefined>(check, undefined);
}

const parameter = object({
  name: tensorName,
  shape,
  offset: place,
  buffer: optional(flag, false),
  personal: optional(flag, false),
  infer_offset: optional(nullable(bytes), null),
});
const input = object({
  name: tensorName,
  dtype: oneOf(["float32", "float64", "int64", "int32", "uint8", "bool"]),
  shape,
  below: optional(nullable(integer(1)), null),
  ignored: optional(nullable(integer(-(2 ** 53 - 1))), null),
});
const state = object({ name: tensorName, shape, offset: place, kept: optional(flag, false) });
const step = object({
  optimizer: optional(oneOf(["sgd", "momentum", "nesterov", "adam", "adamw", "custom"]), "sgd"),
  proximal: optional(flag, false),
  correction: optional(flag, false),
  contrastive: optional(flag, false),
  clip: optional(flag, false),
  weight_decay: optional(flag, false),
});
const manifest = object({
  format: text(100),
  version: integer(),
  name: text(100, 1),
  parameters: list(parameter, 100_000, 1),
  batch: list(input, 64, 1),
  outputs: list(input, 64, 1),
  hyper: list(object({ name, default: optional(nullable(number()), null) }), 64),
  step,
  metrics: list(name, 64),
  files: record(text(200), object({ sha256: digest, size: bytes }), 64),
  state: optional(list(state, 100_000), []),
  references: optional(list(oneOf(["anchor", "correction", "previous"]), 3), []),
  random: optional(flag, false),
  many: optional(
    nullable(
      object({
        devices: integer(1, 2 ** 20),
        steps: integer(1, 10_000),
        batch: optional(nullable(integer(1, 2 ** 20)), null),
      }),
    ),
    null,
  ),
  features: leftOut(list(input, 64, 1)),
  compute: leftOut(oneOf(["float16"])),
  normalisation: leftOut(list(tensorName, 100_000, 1)),
  preprocessing: leftOut(preprocessing),
  opset: optional(integer(0, 1000), 0),
  ir_version: optional(integer(0, 1000), 0),
  made_by: optional(text(200), ""),
});

type Fields = Checked<typeof manifest>;
export type Parameter = Checked<typeof parameter>;
export type Input = Checked<typeof input>;
export type State = Checked<typeof state>;
export type LocalStep = Checked<typeof step>;
export type Reference = Fields["references"][number];
export type Hyper = Fields["hyper"][number];

export interface Manifest extends Fields {
  /** P, the elements of the flat vector that travels. */
  readonly size: number;
  /** Elements of the flat vector on a device: what travels, then the personal parameters. */
  readonly localSize: number;
  /** Elements of the flat state vector. */
  readonly stateSize: number;
}

/** Elements of a tensor of this shape. */
export function elementsOf(row: { readonly shape: readonly number[] }): number {
  return row.shape.reduce((product, axis) => product * axis, 1);
}

/** The rows that travel and take no gradient. */
export function bufferRows(parameters: readonly Parameter[]): Parameter[] {
  return parameters.filter((row) => row.buffer && !row.personal);
}

/** Return a copy of the buffers' elements, one row after the other. */
export function gatherBuffers(vector: Float32Array, parameters: readonly Parameter[]): Float32Array {
  const rows = bufferRows(parameters);
  const values = new Float32Array(rows.reduce((total, row) => total + elementsOf(row), 0));
  let offset = 0;
  for (const row of rows) {
    values.set(vector.subarray(row.offset, row.offset + elementsOf(row)), offset);
    offset += elementsOf(row);
  }
  return values;
}

/** Set the buffers' elements, which take no gradient, to 0. Returns the vector. */
export function withoutBuffers(vector: Float32Array, parameters: readonly Parameter[]): Float32Array {
  for (const row of bufferRows(parameters)) vector.fill(0, row.offset, row.offset + elementsOf(row));
  return vector;
}

/** Read and check manifest.json. Throws BundleError, naming what is wrong and what was expected. */
export function readManifest(content: Uint8Array): Manifest {
  if (content.length > MAX_MANIFEST_BYTES) {
    throw new BundleError("too-large", `a manifest of ${content.length} bytes; the limit is ${MAX_MANIFEST_BYTES}`);
  }
  let parsed: unknown;
  try {
    parsed = JSON.parse(new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(content));
  } catch (error) {
    throw new BundleError("bad-message", `manifest.json is not a bundle's manifest: ${(error as Error).message}`);
  }
  const { format, version } = (parsed ?? {}) as Record<string, unknown>;
  if (format !== FORMAT) {
    throw new BundleError("bad-message", `manifest.json is of format ${JSON.stringify(format)}; expected "${FORMAT}"`);
  }
  if (Number.isInteger(version) && !VERSIONS.includes(version as number)) {
    throw new BundleError("bad-version", `the bundle is of version ${version}; this SDK reads versions 1 to 3`);
  }
  let fields: Fields;
  try {
    fields = checked(manifest, parsed, "manifest.json");
  } catch (error) {
    throw error instanceof ProtocolError ? new BundleError(error.code, error.text) : error;
  }
  const problem = contradiction(fields);
  if (problem !== undefined) throw new BundleError("bad-message", `manifest.json contradicts itself: ${problem}`);
  const sum = (rows: readonly { readonly shape: readonly number[] }[]): number =>
    rows.reduce((total, row) => total + elementsOf(row), 0);
  const size = sum(fields.parameters.filter((row) => !row.personal));
  return { ...fields, size, localSize: sum(fields.parameters), stateSize: sum(fields.state) };
}

/** Check what the types alone cannot say. Returns the first thing that is wrong. */
function contradiction(fields: Fields): string | undefined {
  const paths = Object.keys(fields.files);
  for (const path of paths) {
    if (!path.split("/").every((part) => PLAIN_NAME.test(part))) {
      return `file path ${JSON.stringify(path)} is not a plain path below the bundle`;
    }
  }
  const named = (rows: readonly { readonly name: string }[]): string[] => rows.map((row) => row.name);
  const lists: [string, readonly string[]][] = [
    ["parameter", named(fields.parameters)],
    ["batch array", named(fields.batch)],
    ["feature", named(fields.features ?? [])],
    ["output", named(fields.outputs)],
    ["hyper-parameter", named(fields.hyper)],
    ["metric", fields.metrics],
    ["state", named(fields.state)],
    ["reference", fields.references],
    ["normalisation parameter", fields.normalisation ?? []],
    // Some file systems do not tell upper case from lower.
    ["file", ["manifest.json", ...paths].map((path) => path.toLowerCase())],
  ];
  for (const [what, names] of lists) {
    const twice = names.find((one, index) => names.length < 1000 && names.indexOf(one) !== index);
    if (twice !== undefined || new Set(names).size < names.length) return `${what} ${twice ?? ""} is there twice`;
  }
  for (const row of fields.batch) {
    if (row.below !== null && !["int64", "int32", "uint8"].includes(row.dtype)) {
      return `batch array ${row.name} is ${row.dtype} and has a range; integers alone have one`;
    }
  }
  if (fields.hyper.some((row) => row.name === "seed")) {
    return "a hyper-parameter is named seed, which is the random steps' own input";
  }
  if (fields.preprocessing !== undefined) {
    const problem = contradictionOf(fields.preprocessing, fields.version, named(fields.batch));
    if (problem !== undefined) return problem;
  }
  return contradictionOfFiles(fields, paths) ?? contradictionOfStep(fields) ?? contradictionOfTables(fields);
}

function contradictionOfFiles(fields: Fields, paths: readonly string[]): string | undefined {
  const wanted = [TRAIN, EVAL, INFER, PARAMETERS];
  for (const path of paths) {
    if (paths.some((other) => other.toLowerCase().startsWith(`${path.toLowerCase()}/`))) {
      return `${path} is a file and a folder`;
    }
    if (path.startsWith("ort_training/")) wanted.push(...ORT_TRAINING.map((one) => `ort_training/${one}`));
  }
  if (FROZEN in fields.files && fields.version < 2) {
    return `${FROZEN} is in a bundle of version ${fields.version}; it needs version 2`;
  }
  if ((fields.many !== null) !== TRAIN_MANY in fields.files) {
    return `${TRAIN_MANY} and the entry many belong together; one of them is missing`;
  }
  if (fields.features !== undefined) {
    wanted.push(...OF_FEATURES);
    const ofBatch = new Map(fields.batch.map((row) => [row.name, JSON.stringify(row)]));
    for (const row of fields.features) {
      if ((ofBatch.get(row.name) ?? JSON.stringify(row)) !== JSON.stringify(row)) {
        return `feature ${row.name} is an array of the batch, and not the same there`;
      }
    }
    if (fields.features.every((row) => ofBatch.has(row.name))) {
      return "all features are arrays of the batch: none is computed";
    }
  } else if (OF_FEATURES.some((path) => path in fields.files)) {
    return `${OF_FEATURES.join(", ")} and the entry features belong together; the entry is missing`;
  }
  const missing = wanted.find((path) => !(path in fields.files));
  return missing === undefined ? undefined : `${missing} is missing`;
}

function contradictionOfStep(fields: Fields): string | undefined {
  const read = { proximal: ["anchor"], correction: ["correction"], contrastive: ["anchor", "previous"] } as const;
  for (const [name, references] of Object.entries(read)) {
    for (const reference of references) {
      if (fields.step[name as keyof typeof read] && !fields.references.includes(reference)) {
        return `a ${name} step reads the reference ${reference}, which is not among ${fields.references.join(", ")}`;
      }
    }
  }
  return undefined;
}

function contradictionOfTables(fields: Fields): string | undefined {
  for (const [what, table] of [
    ["parameter", fields.parameters],
    ["state", fields.state],
  ] as const) {
    let end = 0;
    for (const row of table) {
      if (row.offset !== end) return `${what} ${row.name} begins at ${row.offset}; the ones before it end at ${end}`;
      end += elementsOf(row);
      if (end > MAX_ELEMENTS)
        return `up to ${what} ${row.name} there are ${end} elements; the limit is ${MAX_ELEMENTS}`;
    }
  }
  const names = new Set(fields.parameters.map((row) => row.name));
  const unknown = fields.normalisation?.find((one) => !names.has(one));
  if (unknown !== undefined) return `${unknown} is of a normalisation layer, and no parameter has this name`;
  const firstPersonal = fields.parameters.findIndex((row) => row.personal);
  if (firstPersonal === 0) return "every parameter is personal: nothing travels";
  if (firstPersonal > 0 && fields.parameters.slice(firstPersonal).some((row) => !row.personal)) {
    return "a parameter that travels comes after one that is personal; those are the last";
  }
  const rows = fields.parameters
    .filter((row) => row.infer_offset !== null)
    .sort((a, b) => a.infer_offset! - b.infer_offset!);
  let free = 0;
  for (const row of rows) {
    if (row.infer_offset! < free) return `the bytes of parameter ${row.name} in ${INFER} overlap another's`;
    free = row.infer_offset! + 4 * elementsOf(row);
  }
  if (free > fields.files[INFER]!.size) return `the parameters' bytes end at ${free} in ${INFER}, behind its end`;
  return undefined;
}
