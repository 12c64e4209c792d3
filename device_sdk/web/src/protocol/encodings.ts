/** How a vector of float32 becomes the bytes that travel, and becomes a vector again: block by block (formats.ts). */

import { ProtocolError } from "./errors.ts";
import { BFLOAT16, checkFinite, FLOAT16, FLOAT32, type Format, INT4, INT8, masked, topK } from "./formats.ts";
import { Fractions } from "./splitmix64.ts";

export class Encoding {
  /** Its name on the wire. */
  readonly name: string;
  /** Elements of a block. */
  readonly block: number;
  readonly #format: Format;

  constructor(name: string, block: number, format: Format) {
    this.name = name;
    this.block = block;
    this.#format = format;
  }

  /** Bytes of a whole block. */
  get blockBytes(): number {
    return this.#format.size(this.block);
  }

  /** Return the bytes of this many elements. */
  size(elements: number): number {
    const rest = elements % this.block;
    return ((elements - rest) / this.block) * this.blockBytes + (rest > 0 ? this.#format.size(rest) : 0);
  }

  /**
   * Return the vector's bytes. `seed` decides how elements are rounded, where the encoding draws that. Throws
   * ProtocolError (not-finite, out-of-range).
   */
  encode(vector: Float32Array, seed = 0): Uint8Array {
    if (this.name !== "float32") checkFinite(vector);
    const content = new Uint8Array(this.size(vector.length));
    const fractions = new Fractions(seed);
    this.#blocks(vector.length, (elements, bytes) => {
      this.#format.encode(vector.subarray(...elements), content.subarray(...bytes), fractions);
    });
    return content;
  }

  /** Return the vector whose bytes these are; they have passed `check`. Throws ProtocolError (wrong-length). */
  decode(content: Uint8Array, elements = this.#elementsOf(content)): Float32Array {
    this.#checkLength(content, elements);
    const vector = new Float32Array(elements);
    this.#blocks(elements, (places, bytes) => {
      this.#format.decode(content.subarray(...bytes), vector.subarray(...places));
    });
    return vector;
  }

  /** Return the greatest magnitude. Throws ProtocolError (wrong-length, not-finite, bad-encoding). */
  check(content: Uint8Array, elements = this.#elementsOf(content)): number {
    this.#checkLength(content, elements);
    let largest = 0;
    this.#blocks(elements, ([begin, end], bytes) => {
      largest = Math.max(largest, this.#format.check(content.subarray(...bytes), end - begin));
    });
    return largest;
  }

  /** Call `visit` with the range of the elements of each block, and the range of its bytes. Elements that stand alone are
   * one block: the fewer calls, the quicker. */
  #blocks(elements: number, visit: (elements: [number, number], bytes: [number, number]) => void): void {
    const step = this.block === 1 ? Math.max(elements, 1) : this.block;
    for (let begin = 0; begin < elements; begin += step) {
      const end = Math.min(begin + step, elements);
      visit([begin, end], [this.size(begin), this.size(end)]);
    }
  }

  /** Return how many elements whole blocks of these bytes have. */
  #elementsOf(content: Uint8Array): number {
    return Math.floor(content.length / this.blockBytes) * this.block;
  }

  #checkLength(content: Uint8Array, elements: number): void {
    if (content.length !== this.size(elements)) {
      const text = `${content.length} bytes of ${this.name} were given; ${elements} elements take ${this.size(elements)}`;
      throw new ProtocolError("wrong-length", text);
    }
  }
}

const ENCODINGS: Readonly<Record<string, Encoding>> = Object.fromEntries(
  [
    new Encoding("float32", 1, FLOAT32),
    new Encoding("float16", 1, FLOAT16),
    new Encoding("bfloat16", 1, BFLOAT16),
    new Encoding("int8", 256, INT8),
    new Encoding("int4", 64, INT4),
  ].map((encoding) => [encoding.name, encoding]),
);
/** Of tasks with secure aggregation alone: its words are made by secure/masking.ts. */
const MASKED_WORDS: Readonly<Record<string, Encoding>> = {
  masked: new Encoding("masked", 1, masked(4)),
  masked24: new Encoding("masked24", 1, masked(3)),
};
const VALUES: Readonly<Record<string, Format>> = { float32: FLOAT32, float16: FLOAT16, int8: INT8 };
const TOP_K_BLOCK = 4096;
const TOP_K_NAME = /^topk-0\.([0-9]{0,5}[1-9])(?:-(float16|int8))?$/;

/** The encodings of each element by itself: a vector can be decoded before its length is known. */
export const FLOATS = ["float32", "float16", "bfloat16"];
/** What a device says that it knows: the encodings, those with parameters by the first word of their names. */
export const FAMILIES = [...Object.keys(ENCODINGS), "topk"];
/** The same of a device that can mask, beside them. */
export const MASKED_NAMES = Object.keys(MASKED_WORDS);
/** The tied vector with what top-k has left out of a device's updates so far. */
export const RESIDUAL = "residual";

/** Return the encoding of this name. Throws ProtocolError (bad-encoding). */
export function findEncoding(name: string): Encoding {
  if (Object.hasOwn(ENCODINGS, name)) return ENCODINGS[name]!;
  if (Object.hasOwn(MASKED_WORDS, name)) return MASKED_WORDS[name]!;
  const parts = TOP_K_NAME.exec(name);
  if (parts === null) {
    const known = Object.keys(ENCODINGS).join(", ");
    const text = `there is no encoding ${name}; expected ${known}, or top-k: topk-0.01, topk-0.01-float16 or topk-0.01-int8`;
    throw new ProtocolError("bad-encoding", text);
  }
  const share = [Number(parts[1]), 10 ** parts[1]!.length] as const;
  return new Encoding(name, TOP_K_BLOCK, topK(share, VALUES[parts[2] ?? "float32"]!));
}

/** Return whether there is an encoding of this name, and its family is one of `families`. */
export function isKnown(name: string, families: readonly string[]): boolean {
  const known = Object.hasOwn(ENCODINGS, name) || TOP_K_NAME.test(name) || Object.hasOwn(MASKED_WORDS, name);
  return known && families.includes(name.split("-")[0]!);
}

/** Return whether a device adds to its next update what this encoding left out of the last one. */
export function leavesResidual(name: string): boolean {
  return name.startsWith("topk-");
}
