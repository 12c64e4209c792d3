/**
 * The control messages: small JSON objects in text frames. PROTOCOL.md, sections 12 to 14, says what each field means.
 *
 * A message that was read is one that can be handled: its strings are short, its numbers finite and in range. What only
 * the conversation can judge is judged by the session.
 */

import {
  anything,
  type Check,
  type Checked,
  flag,
  integer,
  list,
  literal,
  Mismatch,
  nullable,
  number,
  object,
  oneOf,
  optional,
  pattern,
  record,
  text,
} from "./checks.ts";
import { CODES, MAX_TEXT, ProtocolError } from "./errors.ts";
import { CHUNK_BYTES } from "./frames.ts";

/** The newest and the oldest version of the protocol that this SDK speaks (PROTOCOL.md, section 10). */
export const PROTOCOL_VERSION = 3;
export const OLDEST_PROTOCOL_VERSION = 1;
/** The WebSocket subprotocol that both sides name in the handshake. */
export const PROTOCOL_NAME = "fleetlearn.v1";
/** Largest control message, in bytes of UTF-8. */
export const MAX_CONTROL_BYTES = 64 * 1024;
/** Most bytes of a vector, and of all parts of a report together. */
export const MAX_VECTOR_BYTES = 2 ** 33;
export const MAX_VECTORS = 8;
/** Most public keys that a device trusts. */
export const MAX_KEYS = 8;
const MAX_SIGNED = 32 * 1024;
/** Most masked updates in one sum. */
export const MOST_REPORTS = 2 ** 16 + 1;
const MOST_NEIGHBOURS = 96;

export const identifier = pattern(/^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$/);
const functionName = pattern(/^[A-Za-z_][A-Za-z0-9_.-]{0,99}(:[A-Za-z_][A-Za-z0-9_]{0,99})?$/);
export const digest = pattern(/^[0-9a-f]{64}$/);
/** 32 or 64 bytes in hexadecimal: a public key or a challenge, a signature. */
export const bytes32 = pattern(/^([0-9a-f]{2}){32}$/);
const bytes64 = pattern(/^([0-9a-f]{2}){64}$/);
/** 80 bytes in hexadecimal: a sealed seed. */
const bytes80 = pattern(/^([0-9a-f]{2}){80}$/);
const bytes82 = pattern(/^([0-9a-f]{2}){82}$/);
export const name = pattern(/^[A-Za-z_][A-Za-z0-9_.-]{0,127}$/);
/** Where something is for HTTP. */
const url = pattern(/^https?:\/\/[!-~]{1,4088}$/);
const forPeople = text(MAX_TEXT);
const label = text(100);
const numbers = record(name, number(), 64);
const positive = number(1e-30, 1e30);
const seconds = number(0, 366 * 86400);
const offset = integer(0, MAX_VECTOR_BYTES);
const vectorSize = integer(1, MAX_VECTOR_BYTES);
const roundNumber = integer(0, 2 ** 31);
export const examples = integer(1, 2 ** 31);
const transfer = integer(1, 2 ** 32 - 1);
const identifiers = list(identifier, 16);
/** An object whose fields are those of a kind of exchange (exchanges.ts). */
const fields = record(name, anything, 64);
const version = integer(0, 10 ** 6);
const code = oneOf(CODES);

const held = object({ task: identifier, round: roundNumber });
const delta = object({ base: digest, sha256: digest, size: vectorSize });
const vectorReference = object({
  name: identifier,
  sha256: digest,
  size: vectorSize,
  encoding: identifier,
  delta: optional(nullable(delta), null),
});
const privacyNote = object({
  spent: number(0, 1e30),
  delta: number(0, 1),
  epsilon: optional(nullable(number(0, 1e30)), null),
});
const secureTask = object({
  mode: oneOf(["helper", "pairwise"]),
  minimum: integer(2, MOST_REPORTS),
  bits: integer(8, 24),
  most_weight: optional(nullable(integer(1)), null),
  least_factor: optional(nullable(number(1e-30, 1)), null),
  helper: optional(nullable(bytes32), null),
  noise: optional(nullable(positive), null),
  session: optional(nullable(bytes32), null),
  shares: optional(record(identifier, bytes82, MOST_NEIGHBOURS), {}),
  reports: optional(nullable(integer(2, MOST_REPORTS)), null),
});
const piece = object({ begin: offset, size: vectorSize, chosen: optional(flag, false) });
/** Pieces of a content, and rows of tables among them. This SDK asks for whole contents. */
const selection = object({ pieces: list(piece, 512, 1), rows: list(integer(0, 2 ** 31), 8192) });
const stepSchedule = object({
  kind: oneOf(["constant", "step", "exponential", "linear", "cosine", "one-cycle"]),
  warm_up: optional(integer(), 0),
  start: optional(number(1e-30, 1), 1),
  every: optional(integer(1), 1),
  factor: optional(number(1e-30, 1), 1),
  steps: optional(nullable(integer(1)), null),
  least: optional(number(1e-30, 1), 1e-4),
  first: optional(integer(), 0),
});
const ownEncoding = object({ function: functionName, parameters: optional(numbers, {}) });
const part = object({ name: identifier, encoding: identifier, size: vectorSize, crc32: integer(0, 2 ** 32 - 1) });
export const evaluation = object({ examples, loss_sum: number(), metric_sums: optional(numbers, {}) });

export type VectorReference = Checked<typeof vectorReference>;
export type Part = Checked<typeof part>;
export type SecureTask = Checked<typeof secureTask>;
export type StepSchedule = Checked<typeof stepSchedule>;
export type Evaluation = Checked<typeof evaluation>;

const FAILURES = [
  "diverged",
  "out-of-time",
  "out-of-memory",
  "killed",
  "disk-full",
  "bad-bundle",
  "bad-data",
  "unsupported",
  "untrusted",
  "runtime-error",
  "paused",
  "stopping",
] as const;
/** Why a device gives its task back. */
export type FailureCode = (typeof FAILURES)[number];

const FROM_DEVICE = {
  "check-in": object({
    type: literal("check-in"),
    protocol: version,
    device: identifier,
    examples,
    runtime: optional(label, ""),
    software: optional(label, ""),
    held: optional(nullable(held), null),
    memory: optional(nullable(integer()), null),
    tags: optional(identifiers, []),
    tier: optional(nullable(identifier), null),
    charging: optional(nullable(flag), null),
    network: optional(nullable(oneOf(["metered", "unmetered"])), null),
    exchanges: optional(identifiers, []),
    algorithms: optional(identifiers, []),
    encodings: optional(identifiers, ["float32"]),
    models: optional(list(digest, MAX_VECTORS), []),
    trusts: optional(list(bytes32, MAX_KEYS), []),
    challenge: optional(nullable(bytes32), null),
    newest_protocol: optional(nullable(version), null),
    error: optional(forPeople, ""),
    wants: optional(oneOf(["tasks", "model"]), "tasks"),
    privacy: optional(identifiers, []),
    functions: optional(list(functionName, 64), []),
  }),
  heartbeat: object({
    type: literal("heartbeat"),
    task: optional(nullable(identifier), null),
    steps: optional(integer(), 0),
    fetched: optional(offset, 0),
  }),
  fetch: object({
    type: literal("fetch"),
    sha256: digest,
    offset: optional(offset, 0),
    end: optional(nullable(offset), null),
    http: optional(flag, false),
    selection: optional(nullable(selection), null),
  }),
  finished: object({ type: literal("finished"), task: identifier }),
  report: object({
    type: literal("report"),
    task: identifier,
    round: roundNumber,
    parts: list(part, MAX_VECTORS, 1),
    examples,
    steps: integer(1, 2 ** 31),
    epochs: number(0, 1e6),
    complete: flag,
    loss: number(),
    metrics: optional(numbers, {}),
    seconds: optional(seconds, 0),
    evaluation: optional(nullable(evaluation), null),
    personal: optional(nullable(evaluation), null),
    lost_tied: optional(flag, false),
    clipped: optional(nullable(flag), null),
    sealed: optional(nullable(bytes80), null),
    signature: optional(nullable(bytes64), null),
  }),
  uploaded: object({ type: literal("uploaded"), task: identifier }),
  reply: object({
    type: literal("reply"),
    task: identifier,
    kind: identifier,
    content: optional(fields, {}),
    seconds: optional(seconds, 0),
  }),
  failed: object({
    type: literal("failed"),
    task: identifier,
    code: oneOf(FAILURES),
    text: optional(forPeople, ""),
  }),
};

const FROM_COORDINATOR = {
  welcome: object({
    type: literal("welcome"),
    coordinator: label,
    heartbeat: number(0.01, 86400),
    chunk_bytes: integer(4, CHUNK_BYTES, 4),
    ineligible: optional(forPeople, ""),
    waits: optional(forPeople, ""),
    newest: optional(nullable(object({ bundle: digest, model: vectorReference })), null),
    warning: optional(forPeople, ""),
    protocol: optional(version, 1),
  }),
  task: object({
    type: literal("task"),
    task: identifier,
    round: roundNumber,
    bundle: digest,
    vectors: list(vectorReference, MAX_VECTORS, 1),
    parts: record(identifier, identifier, MAX_VECTORS, 1),
    hyper: numbers,
    epochs: integer(1, 10 ** 6),
    batch_size: integer(0, 2 ** 31),
    seed: integer(),
    deadline: seconds,
    time_budget: optional(nullable(seconds), null),
    evaluate: optional(flag, false),
    algorithm: optional(identifier, "plain"),
    kept: optional(nullable(identifier), null),
    personal_epochs: optional(nullable(integer(1, 10 ** 6)), null),
    clip: optional(nullable(positive), null),
    local_noise: optional(nullable(positive), null),
    privacy: optional(nullable(privacyNote), null),
    secure: optional(nullable(secureTask), null),
    schedule: optional(nullable(stepSchedule), null),
    function: optional(nullable(functionName), null),
    encoding: optional(nullable(ownEncoding), null),
  }),
  question: object({
    type: literal("question"),
    task: identifier,
    kind: identifier,
    deadline: seconds,
    phase: optional(integer(1, 1000), 1),
    content: optional(fields, {}),
    bundle: optional(nullable(digest), null),
    vectors: optional(list(vectorReference, MAX_VECTORS), []),
  }),
  trust: object({ type: literal("trust"), keys: list(bytes32, MAX_KEYS, 1) }),
  signed: object({ type: literal("signed"), message: text(MAX_SIGNED), key: bytes32, signature: bytes64 }),
  "come-back": object({
    type: literal("come-back"),
    after: seconds,
    reason: oneOf(["no-task", "busy", "stopping", "finished"]),
  }),
  content: object({
    type: literal("content"),
    transfer,
    sha256: digest,
    size: offset,
    offset,
    end: optional(nullable(offset), null),
    url: optional(nullable(url), null),
    selected: optional(nullable(digest), null),
  }),
  weighing: object({ type: literal("weighing"), task: identifier, factor: number(0, 1) }),
  grant: object({ type: literal("grant"), task: identifier, transfer, offset }),
  waiting: object({
    type: literal("waiting"),
    task: optional(nullable(identifier), null),
    sha256: optional(nullable(digest), null),
  }),
  accepted: object({ type: literal("accepted"), task: identifier }),
  cancel: object({ type: literal("cancel"), task: identifier, code, text: optional(forPeople, "") }),
  refused: object({
    type: literal("refused"),
    code,
    text: forPeople,
    task: optional(nullable(identifier), null),
    sha256: optional(nullable(digest), null),
  }),
};

type Types<Table extends Record<string, Check<unknown>>> = { [Type in keyof Table]: Checked<Table[Type]> };
export type FromDevice = Types<typeof FROM_DEVICE>[keyof typeof FROM_DEVICE];
export type FromCoordinator = Types<typeof FROM_COORDINATOR>[keyof typeof FROM_COORDINATOR];
export type CheckIn = Types<typeof FROM_DEVICE>["check-in"];
export type Report = Types<typeof FROM_DEVICE>["report"];
export type Reply = Types<typeof FROM_DEVICE>["reply"];
export type Failed = Types<typeof FROM_DEVICE>["failed"];
export type Task = Types<typeof FROM_COORDINATOR>["task"];
export type Question = Types<typeof FROM_COORDINATOR>["question"];
export type Content = Types<typeof FROM_COORDINATOR>["content"];
export type Grant = Types<typeof FROM_COORDINATOR>["grant"];
export type Waiting = Types<typeof FROM_COORDINATOR>["waiting"];
export type Signed = Types<typeof FROM_COORDINATOR>["signed"];
export type Trust = Types<typeof FROM_COORDINATOR>["trust"];
export type Weighing = Types<typeof FROM_COORDINATOR>["weighing"];
export type Welcome = Types<typeof FROM_COORDINATOR>["welcome"];
export type Refused = Types<typeof FROM_COORDINATOR>["refused"];

/** Read a text frame of the coordinator's. Throws ProtocolError (bad-message, unknown-type, too-large). */
export function readFromCoordinator(frame: string): FromCoordinator {
  return read(frame, FROM_COORDINATOR);
}

/** Read a message of a device: one that the device saved, or in tests. Throws ProtocolError. */
export function readFromDevice(frame: string): FromDevice {
  return read(frame, FROM_DEVICE);
}

/** Return the message as the text of one frame. Throws ProtocolError where the coordinator would refuse it. */
export function encode(message: FromDevice): string {
  const frame = JSON.stringify(message);
  readFromDevice(frame); // NaN becomes null in JSON, which no number may be
  return frame;
}

function read<Table extends Record<string, Check<unknown>>>(frame: string, table: Table): Types<Table>[keyof Table] {
  // A character takes 1 to 3 bytes for each of its UTF-16 units.
  if (frame.length > MAX_CONTROL_BYTES || new TextEncoder().encode(frame).length > MAX_CONTROL_BYTES) {
    throw new ProtocolError("too-large", `a message of over ${MAX_CONTROL_BYTES} bytes was sent`);
  }
  let fields: unknown;
  try {
    fields = JSON.parse(frame);
  } catch (error) {
    throw new ProtocolError("bad-message", `a message is not JSON: ${(error as Error).message}`);
  }
  const type = typeof fields === "object" && fields !== null && "type" in fields ? fields.type : undefined;
  if (typeof type !== "string" || Array.isArray(fields)) {
    throw new ProtocolError("bad-message", "a message is no object with a type");
  }
  const check = Object.hasOwn(table, type) ? table[type] : undefined;
  if (check === undefined)
    throw new ProtocolError("unknown-type", `a message of the type ${type.slice(0, 64)} was sent`);
  return checked(check, fields, type) as Types<Table>[keyof Table];
}

/** Return the value if the check takes it. Throws ProtocolError (bad-message). `what`: what the value is, for people. */
export function checked<T>(check: Check<T>, value: unknown, what: string): T {
  try {
    return check(value, "");
  } catch (error) {
    if (error instanceof Mismatch) throw new ProtocolError("bad-message", `${what}: ${error.message}`);
    throw error;
  }
}
