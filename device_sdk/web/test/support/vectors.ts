/** The protocol's vectors, read where they lie. */

import { readFileSync } from "node:fs";

// biome-ignore lint/suspicious/noExplicitAny: a case has what its file's README says; tests compare it field by field
export type Case = any;

export function vectors(file: string): Record<string, Case> {
  return JSON.parse(readFileSync(new URL(`../../../../protocol/vectors/${file}`, import.meta.url), "utf8"));
}

export function hex(text: string): Uint8Array {
  return Uint8Array.from(Buffer.from(text, "hex"));
}

export function toHex(content: Uint8Array): string {
  return Buffer.from(content).toString("hex");
}

/** The bytes of `[hex, times]` pieces. */
export function repeated(pieces: [string, number][]): Uint8Array {
  return hex(pieces.map(([piece, times]) => piece.repeat(times)).join(""));
}

/** What a case gives: text, bytes, or pieces of text. */
export function content(given: { text?: string; hex?: string; pieces?: [string, number][] }): Uint8Array {
  if (given.hex !== undefined) return hex(given.hex);
  const text = given.text ?? given.pieces!.map(([piece, times]) => piece.repeat(times)).join("");
  return new TextEncoder().encode(text);
}

/** The code of the ProtocolError that a function throws. */
export async function codeOf(act: () => unknown): Promise<string> {
  try {
    await act();
  } catch (error) {
    const { code, text } = error as { code?: string; text?: string };
    if (code !== undefined && text !== undefined && text.length > 0 && [...text].length <= 1000) return code;
    throw error;
  }
  return "nothing was thrown";
}
