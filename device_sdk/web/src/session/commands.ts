/** The commands that a session gives to its owner, who carries them out in order. */

import type { FromDevice, Question, Report, Signed, Task } from "../protocol/messages.ts";

/** A content that the device lacks. */
export interface Wanted {
  readonly sha256: string;
  /** The name for people, such as `graphs/train.onnx`. */
  readonly name: string;
  /** The store's key of the complete content. */
  readonly place: string;
  /** Bytes. null: only the coordinator knows. */
  readonly size: number | null;
  /** Most bytes that the content may have. */
  readonly limit: number;
  /** Bytes that arrived in an earlier attempt. */
  readonly have: number;
  /** For a difference: SHA-256 of the vector that it differs from. */
  readonly base?: string;
  /** For a difference: the whole vector, which is fetched if the difference cannot be had. */
  readonly instead?: Wanted;
}

export type Command =
  /** Send the message, if the connection is still open. */
  | { do: "send"; message: FromDevice }
  /** Find out whether the owner of `signed.key` signed the content; answer with `verified` before anything else. */
  | { do: "verify"; signed: Signed; content: Uint8Array<ArrayBuffer> }
  /** Make these keys durable: from now on the device trusts them, and no others. */
  | { do: "save-trusted"; keys: readonly string[] }
  /** Look up what the task lacks; answer with `located`. */
  | { do: "locate"; task: Task | Question }
  /** Append to the partial content. `offset` 0 begins it again. */
  | { do: "store-chunk"; wanted: Wanted; offset: number; payload: Uint8Array }
  /** GET the wanted content's bytes from `begin` up to `size`, instead of any that are being fetched so; answer with
   * `httpBytes` for each part, and with `httpEnded` where not all came. Whoever has the URL can read the content: it is
   * not for the log. */
  | { do: "fetch-by-http"; wanted: Wanted; url: string; begin: number; size: number }
  /** GET no more bytes. */
  | { do: "stop-http" }
  /** Put the complete content in its place, or delete it where its SHA-256 is wrong; answer with `stored`. */
  | { do: "finish-content"; wanted: Wanted }
  /** Train within this many seconds; answer with `trained` or `ended`. */
  | { do: "start-training"; task: Task; seconds: number }
  /** Work out what is asked within this many seconds; answer with `answered` or `ended`. */
  | { do: "start-answer"; task: Question; seconds: number }
  /** Stop the task's training, or the work on an answer, before its next batch; answer with `ended`. */
  | { do: "stop-training" }
  /** Make the update and its report durable, all or nothing; answer with `saved`. A task in place of a report: its update
   * is not masked yet. */
  | { do: "save-update"; result: Report | Task }
  /** Multiply the saved update of this task by what its staleness leaves of it, mask it, and make that durable in its
   * place; answer with `masked` or `ended`. */
  | { do: "mask-update"; task: Task; factor: number }
  /** Delete the saved update of this task; stop uploading it. */
  | { do: "drop-update"; task: string }
  /** Send the saved update's chunks from `offset` on, instead of any that are being sent; answer with `updateSent`. */
  | { do: "send-update"; report: Report; transfer: number; offset: number; chunkBytes: number }
  /** Send no more chunks of the saved update. */
  | { do: "stop-update" }
  /** Close the connection (what was sent before goes out first); answer with `disconnected`. `after`: seconds after
   * which to connect again, about; null: after a back-off. `code`: 1002 where the coordinator broke the protocol. */
  | { do: "close"; reason: string; after: number | null; code: 1000 | 1002 }
  /** A line for the log. */
  | { do: "note"; text: string; warning: boolean };
