/** A vector as its difference from another that the device has (PROTOCOL.md, "Differences"). */

import { ProtocolError } from "./errors.ts";

/** Return the vector's bytes, made of the bytes of `base`. Rejects with ProtocolError (bad-encoding). */
export async function applyDelta(base: Uint8Array, delta: Uint8Array): Promise<Uint8Array> {
  const difference = await inflate(delta, base.length);
  if (difference.length !== base.length || base.length % 4 !== 0) {
    const text = `the difference is of ${difference.length} bytes or more; the base has ${base.length}`;
    throw new ProtocolError("bad-encoding", text);
  }
  const elements = base.length / 4;
  const vector = new Uint8Array(base.length);
  for (let byte = 0; byte < 4; byte++) {
    for (let element = 0, place = byte; element < elements; element++, place += 4) {
      vector[place] = base[place]! ^ difference[byte * elements + element]!;
    }
  }
  return vector;
}

/** Decompress a zlib stream, and no more of it than tells that it has over `most` bytes: a small delta must not become
 * a huge vector. */
async function inflate(content: Uint8Array, most: number): Promise<Uint8Array> {
  const reader = new Response(new Uint8Array(content))
    .body!.pipeThrough(new DecompressionStream("deflate"))
    .getReader();
  const pieces: Uint8Array[] = [];
  let size = 0;
  try {
    while (size <= most) {
      const { done, value } = await reader.read();
      if (done) break;
      pieces.push(value);
      size += value.length;
    }
    if (size > most) await reader.cancel();
  } catch (error) {
    throw new ProtocolError("bad-encoding", `the difference cannot be decompressed: ${(error as Error).message}`);
  }
  return joined(pieces);
}

/** Return the pieces as one array. */
export function joined(pieces: readonly Uint8Array[]): Uint8Array<ArrayBuffer> {
  const whole = new Uint8Array(pieces.reduce((size, piece) => size + piece.length, 0));
  let begin = 0;
  for (const piece of pieces) {
    whole.set(piece, begin);
    begin += piece.length;
  }
  return whole;
}
