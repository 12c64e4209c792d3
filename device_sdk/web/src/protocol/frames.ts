/** Binary frames: bulk bytes travel as chunks, each one a WebSocket message with a 16-byte header (PROTOCOL.md, 3). */

import { ProtocolError } from "./errors.ts";

/** Bytes of a full chunk's payload. */
export const CHUNK_BYTES = 128 * 1024;
const HEADER_BYTES = 16;
/** Largest binary message, in bytes. */
export const MAX_FRAME_BYTES = HEADER_BYTES + CHUNK_BYTES;
const CHUNK_KIND = 1;

export interface Chunk {
  readonly transfer: number;
  /** Place of the payload's first byte in the content or upload, in bytes. */
  readonly offset: number;
  readonly payload: Uint8Array;
}

/** Return the chunk as one binary message. `payload` is 1 to CHUNK_BYTES bytes. Throws RangeError. */
export function packChunk(transfer: number, offset: number, payload: Uint8Array): Uint8Array<ArrayBuffer> {
  if (payload.length === 0 || payload.length > CHUNK_BYTES) {
    throw new RangeError(`a chunk of ${payload.length} bytes was given; it takes 1 to ${CHUNK_BYTES}`);
  }
  const frame = new Uint8Array(HEADER_BYTES + payload.length);
  const header = new DataView(frame.buffer);
  header.setUint8(0, CHUNK_KIND);
  header.setUint32(4, transfer, true);
  header.setBigUint64(8, BigInt(offset), true);
  frame.set(payload, HEADER_BYTES);
  return frame;
}

/** Read a binary message. The payload is a view into it. Throws ProtocolError (bad-frame, too-large). */
export function unpackChunk(frame: Uint8Array): Chunk {
  if (frame.length <= HEADER_BYTES) {
    const text = `a binary frame of ${frame.length} bytes was sent; a chunk has a header of ${HEADER_BYTES} and a payload`;
    throw new ProtocolError("bad-frame", text);
  }
  if (frame.length > MAX_FRAME_BYTES) {
    throw new ProtocolError("too-large", `a chunk of ${frame.length} bytes was sent; the limit is ${MAX_FRAME_BYTES}`);
  }
  const header = new DataView(frame.buffer, frame.byteOffset, HEADER_BYTES);
  if (header.getUint32(0, true) !== CHUNK_KIND) {
    const begin = [...frame.subarray(0, 4)].join(" ");
    throw new ProtocolError("bad-frame", `a binary frame begins with the bytes ${begin}; a chunk begins with 1 0 0 0`);
  }
  const offset = Number(header.getBigUint64(8, true));
  return { transfer: header.getUint32(4, true), offset, payload: frame.subarray(HEADER_BYTES) };
}
