/** The errors of messages, frames and bundles, and the codes that name what was wrong (PROTOCOL.md, section 8). */

export const CODES = [
  "bad-message",
  "unknown-type",
  "too-large",
  "bad-version",
  "bad-frame",
  "out-of-turn",
  "duplicate",
  "unknown-task",
  "stale-round",
  "not-wanted",
  "unknown-content",
  "wrong-offset",
  "wrong-length",
  "wrong-hash",
  "wrong-parts",
  "bad-encoding",
  "not-finite",
  "out-of-range",
  "norm-too-large",
  "busy",
  "replaced",
  "round-over",
] as const;
export type Code = (typeof CODES)[number];

/** Longest text for people in a message, in characters (code points). */
export const MAX_TEXT = 1000;

/** Return the text as a message may carry it: at most MAX_TEXT characters, no lone surrogates. */
export function clip(text: string): string {
  const characters = [...text].map((one) => (/^[\ud800-\udfff]$/.test(one) ? "\ufffd" : one));
  return characters.length <= MAX_TEXT ? characters.join("") : `${characters.slice(0, MAX_TEXT - 1).join("")}…`;
}

/** A message, a frame or vector bytes that break the protocol. `code` is for programs, `text` (clipped) for people. */
export class ProtocolError extends Error {
  override name = "ProtocolError";
  readonly code: Code;
  readonly text: string;

  constructor(code: Code, text: string) {
    super(`${clip(text)} [${code}]`);
    this.code = code;
    this.text = clip(text);
  }
}

/** A training bundle that is damaged, foreign, incomplete or too new. */
export class BundleError extends ProtocolError {
  override name = "BundleError";
}
