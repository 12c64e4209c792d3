/** How a block of float32 becomes bytes: the formats that the encodings are made of (PROTOCOL.md, "Encodings"). */

import { ProtocolError } from "./errors.ts";
import type { Fractions } from "./splitmix64.ts";

export interface Format {
  /** n -> bytes of a block of n elements. */
  size(elements: number): number;
  /** Write a block's bytes. Draws what it needs in the elements' order. Throws ProtocolError (out-of-range). */
  encode(block: Float32Array, into: Uint8Array, fractions: Fractions): void;
  /** Write the elements of a block's bytes, which have passed `check`, into a block of zeros. */
  decode(content: Uint8Array, into: Float32Array): void;
  /** Return the greatest magnitude of n elements. Throws ProtocolError (not-finite, bad-encoding). */
  check(content: Uint8Array, elements: number): number;
}

function view(content: Uint8Array): DataView {
  return new DataView(content.buffer, content.byteOffset, content.byteLength);
}

function notFinite(what: string): ProtocolError {
  return new ProtocolError("not-finite", `${what}; it must be finite`);
}

/** Return the greatest magnitude (0 of nothing). Throws ProtocolError (not-finite), naming the first place. */
export function checkFinite(vector: Float32Array): number {
  let largest = 0;
  for (let index = 0; index < vector.length; index++) {
    const magnitude = Math.abs(vector[index]!);
    if (!(magnitude < Number.POSITIVE_INFINITY)) throw notFinite(`element ${index} of the vector is ${vector[index]}`);
    if (magnitude > largest) largest = magnitude;
  }
  return largest;
}

const scratch = new Float32Array(1);
const scratchBits = new Uint32Array(scratch.buffer);

function bitsOf(value: number): number {
  scratch[0] = value;
  return scratchBits[0]!;
}

function ofBits(bits: number): number {
  scratchBits[0] = bits;
  return scratch[0]!;
}

export const FLOAT32: Format = {
  size: (elements) => 4 * elements,
  encode(block, into) {
    into.set(new Uint8Array(block.buffer, block.byteOffset, block.byteLength));
  },
  decode(content, into) {
    new Uint8Array(into.buffer, into.byteOffset, into.byteLength).set(content);
  },
  check(content, elements) {
    const values = new Float32Array(elements);
    this.decode(content, values);
    return checkFinite(values);
  },
};

/** A format of 16 bits for each element. round: the bits of a float32 -> the nearest 16 bits, ties to even. */
function halves(
  name: string,
  infinity: number,
  round: (bits: number) => number,
  widen: (half: number) => number,
): Format {
  return {
    size: (elements) => 2 * elements,
    encode(block, into) {
      const bytes = view(into);
      for (let index = 0; index < block.length; index++) {
        const half = round(bitsOf(block[index]!));
        if ((half & 0x7fff) >= infinity) {
          const text =
            `the vector has the element ${block[index]}; ${name} holds up to ${widen(infinity - 1)}. Training has ` +
            "probably diverged: lower the learning rate, or use the encoding float32";
          throw new ProtocolError("out-of-range", text);
        }
        bytes.setUint16(2 * index, half, true);
      }
    },
    decode(content, into) {
      const bytes = view(content);
      for (let index = 0; index < into.length; index++) into[index] = widen(bytes.getUint16(2 * index, true));
    },
    check(content, elements) {
      const bytes = view(content);
      let largest = 0;
      for (let index = 0; index < elements; index++) {
        const magnitude = bytes.getUint16(2 * index, true) & 0x7fff;
        if (magnitude >= infinity) {
          throw notFinite(`element ${index} of the vector is ${magnitude === infinity ? "infinite" : "NaN"}`);
        }
        if (magnitude > largest) largest = magnitude;
      }
      return widen(largest);
    },
  };
}

/** Return the nearest half precision's bits. Magnitudes that round to 65520 and more become infinity, 0x7C00. */
function roundToHalf(bits: number): number {
  const sign = (bits >>> 16) & 0x8000;
  const magnitude = bits & 0x7fffffff;
  if (magnitude >= 0x477ff000) return sign | 0x7c00;
  if (magnitude >= 0x38800000) {
    // A normal half: 13 bits fewer, and an exponent that begins at another place.
    return sign | ((magnitude - 0x38000000 + 0xfff + ((magnitude >>> 13) & 1)) >>> 13);
  }
  // A multiple of 2^-24. In double precision it is exact, so that the rounding is the only one.
  const units = ofBits(magnitude) * 2 ** 24;
  const below = Math.floor(units);
  const rest = units - below;
  return sign | (rest > 0.5 || (rest === 0.5 && below % 2 === 1) ? below + 1 : below);
}

function widenHalf(half: number): number {
  const exponent = (half >>> 10) & 31;
  const fraction = half & 0x3ff;
  const magnitude = exponent === 0 ? fraction * 2 ** -24 : (1024 + fraction) * 2 ** (exponent - 25);
  return half & 0x8000 ? -magnitude : magnitude;
}

export const FLOAT16 = halves("float16", 0x7c00, roundToHalf, widenHalf);
export const BFLOAT16 = halves(
  "bfloat16",
  0x7f80,
  (bits) => (bits + 0x7fff + ((bits >>> 16) & 1)) >>> 16,
  (half) => ofBits(half << 16),
);

/** Return the format of the words of a masked update: little-endian, `width` bytes each. Any of them is valid, and none is a
 * float. */
export const masked = (width: 3 | 4): Format => ({
  size: (words) => width * words,
  encode() {
    throw new ProtocolError("bad-encoding", "floats were given for the encoding masked; it takes words with a mask");
  },
  decode() {
    throw new ProtocolError("bad-encoding", "masked words have no floats in them: their sum has, without the masks");
  },
  check: () => 0,
});

/** Bytes of a block's scale. */
const SCALE = 4;

/** Call `write` with each element's integer, from -levels to levels, and return the block's scale. */
function quantise(
  block: Float32Array,
  levels: number,
  fractions: Fractions,
  write: (place: number, integer: number) => void,
): number {
  let largest = 0;
  for (let index = 0; index < block.length; index++) largest = Math.max(largest, Math.abs(block[index]!));
  // The scale is the smallest float32 that is not below largest / levels: no integer is beyond the levels.
  let scale = Math.fround(largest / levels);
  if (scale * levels < largest) scale = ofBits(bitsOf(scale) + 1);
  const divisor = scale === 0 ? 1 : scale;
  for (let index = 0; index < block.length; index++) {
    write(index, Math.floor(block[index]! / divisor + fractions.next()));
  }
  return scale;
}

/** A format of a scale and small integers. integer: the bytes after the scale, and a place -> the integer there. */
function integers(
  levels: number,
  bytes: (elements: number) => number,
  integer: (content: Uint8Array, place: number) => number,
  write: (into: Uint8Array, place: number, integer: number) => void,
): Format {
  return {
    size: (elements) => SCALE + bytes(elements),
    encode(block, into, fractions) {
      const body = into.subarray(SCALE);
      body.fill(0);
      const scale = quantise(block, levels, fractions, (place, value) => write(body, place, value));
      view(into).setFloat32(0, scale, true);
    },
    decode(content, into) {
      const scale = view(content).getFloat32(0, true);
      const body = content.subarray(SCALE);
      for (let index = 0; index < into.length; index++) into[index] = integer(body, index) * scale;
    },
    check(content, elements) {
      const scale = view(content).getFloat32(0, true);
      const body = content.subarray(SCALE);
      let greatest = 0;
      for (let index = 0; index < elements; index++) greatest = Math.max(greatest, Math.abs(integer(body, index)));
      const largest = Math.fround(Math.abs(scale) * greatest);
      if (!Number.isFinite(largest)) throw notFinite(`the scale of a block is ${scale}, or one of its elements is not`);
      return largest;
    },
  };
}

export const INT8 = integers(
  127,
  (elements) => elements,
  (content, place) => (content[place]! << 24) >> 24,
  (into, place, value) => {
    into[place] = value;
  },
);
export const INT4 = integers(
  7,
  (elements) => (elements + 1) >> 1,
  (content, place) => (content[place >> 1]! << (place & 1 ? 24 : 28)) >> 28,
  (into, place, value) => {
    into[place >> 1]! |= (value & 15) << (place & 1 ? 4 : 0);
  },
);

/** Bytes of an element's place in its block. */
const PLACE = 2;

/** Return the format that keeps this share of each block, rounded up, and writes it as `values`. Share: a fraction. */
export function topK([numerator, denominator]: readonly [number, number], values: Format): Format {
  const keptOf = (elements: number): number => Math.floor((elements * numerator + denominator - 1) / denominator);
  const places = (content: Uint8Array, count: number): number[] =>
    Array.from({ length: count }, (_, index) => view(content).getUint16(PLACE * index, true));
  return {
    size: (elements) => PLACE * keptOf(elements) + values.size(keptOf(elements)),
    encode(block, into, fractions) {
      const chosen = greatest(block, keptOf(block.length));
      const places = view(into);
      for (const [index, place] of chosen.entries()) places.setUint16(PLACE * index, place, true);
      const elements = Float32Array.from(chosen, (place) => block[place]!);
      values.encode(elements, into.subarray(PLACE * chosen.length), fractions);
    },
    decode(content, into) {
      const count = keptOf(into.length);
      const elements = new Float32Array(count);
      values.decode(content.subarray(PLACE * count), elements);
      places(content, count).forEach((place, index) => {
        into[place] = elements[index]!;
      });
    },
    check(content, elements) {
      const count = keptOf(elements);
      const indices = places(content, count);
      if (indices.some((place, index) => place >= elements || (index > 0 && place <= indices[index - 1]!))) {
        throw new ProtocolError("bad-encoding", `the places in a block must ascend and be below ${elements}`);
      }
      return values.check(content.subarray(PLACE * count), count);
    },
  };
}

/** Return the places of the elements with the greatest magnitudes, ascending. Of equal ones the first. */
function greatest(block: Float32Array, count: number): Uint16Array {
  // The bits of a positive float32 are in its order. With the place below them no two keys are equal.
  const keys = Float64Array.from(block, (value, place) => (bitsOf(value) & 0x7fffffff) * 8192 + (block.length - place));
  const chosen = keys.sort().subarray(block.length - count);
  return Uint16Array.from(chosen, (key) => block.length - (key % 8192)).sort();
}
