import { describe, expect, test } from "vitest";
import { crc32 } from "../../src/protocol/crc32.ts";
import { applyDelta } from "../../src/protocol/deltas.ts";
import { findEncoding, isKnown } from "../../src/protocol/encodings.ts";
import { packChunk, unpackChunk } from "../../src/protocol/frames.ts";
import { gatherBuffers, readManifest, withoutBuffers } from "../../src/protocol/manifest.ts";
import { sha256 } from "../../src/protocol/sha256.ts";
import { type Case, codeOf, content, hex, repeated, toHex, vectors } from "../support/vectors.ts";

describe("frames.json", () => {
  const { valid, invalid } = vectors("frames.json");
  test.each(valid as Case[])("$name", ({ header, payload, transfer, offset }) => {
    const bytes = repeated(payload);
    const frame = new Uint8Array([...hex(header), ...bytes]);
    expect(unpackChunk(frame)).toEqual({ transfer, offset, payload: bytes });
    expect(toHex(packChunk(transfer, offset, bytes))).toBe(toHex(frame));
  });
  test.each(invalid as Case[])("$name", async ({ frame, code }) => {
    expect(await codeOf(() => unpackChunk(repeated(frame)))).toBe(code);
  });
  test("a chunk has a payload, and no more than the largest", () => {
    expect(() => packChunk(1, 0, new Uint8Array(0))).toThrow(RangeError);
    expect(() => packChunk(1, 0, new Uint8Array(131073))).toThrow(RangeError);
  });
});

describe("vector.json", () => {
  const given = vectors("vector.json");
  const float32 = findEncoding(given.encoding);
  test("the vectors, their hashes and checksums", () => {
    for (const name of ["model", "trained", "update", "buffers"]) {
      const bytes = hex(given[name].hex);
      expect(sha256(bytes)).toBe(given[name].sha256);
      expect(crc32(bytes)).toBe(given[name].crc32);
      expect(crc32(bytes.subarray(3), crc32(bytes.subarray(0, 3)))).toBe(given[name].crc32);
      expect(toHex(float32.encode(float32.decode(bytes)))).toBe(given[name].hex);
    }
    const model = float32.decode(hex(given.model.hex));
    const update = float32.decode(hex(given.trained.hex)).map((value, place) => value - model[place]!);
    expect(toHex(float32.encode(withoutBuffers(update, given.table)))).toBe(given.update.hex);
    const buffers = gatherBuffers(float32.decode(hex(given.trained.hex)), given.table);
    expect(toHex(float32.encode(buffers))).toBe(given.buffers.hex);
    const tensors = (given.table as Case[]).flatMap((row) => [given.tensors[row.name]].flat(2));
    expect([...model]).toEqual(tensors);
  });
  test.each(given.invalid as Case[])("$name", async ({ hex: bytes, elements, code }) => {
    expect(await codeOf(() => float32.check(hex(bytes), elements))).toBe(code);
  });
});

test.each([
  ["masked", 4],
  ["masked24", 3],
])("%s words are of %i bytes each, of any value, and no floats", async (name, width) => {
  const masked = findEncoding(name);
  const content = new Uint8Array(3 * width).fill(255);
  expect([masked.blockBytes, masked.size(3), masked.check(content)]).toEqual([width, 3 * width, 0]);
  expect(await codeOf(() => masked.check(new Uint8Array(11)))).toBe("wrong-length");
  expect(await codeOf(() => masked.encode(new Float32Array(3)))).toBe("bad-encoding");
  expect(await codeOf(() => masked.decode(content))).toBe("bad-encoding");
  expect([isKnown(name, ["float32"]), isKnown(name, [name])]).toEqual([false, true]);
});

describe("encodings.json", () => {
  const given = vectors("encodings.json");
  const float32 = findEncoding("float32");
  test.each((given.valid as Case[]).map((one, number) => ({ ...one, number })))("$encoding, $number", (one) => {
    const encoding = findEncoding(one.encoding);
    const vector = float32.decode(hex(one.vector));
    const bytes = encoding.encode(vector, one.seed);
    expect(toHex(bytes)).toBe(one.hex);
    const decoded = encoding.decode(bytes, vector.length);
    expect(encoding.check(bytes, vector.length)).toBe(Math.max(...decoded.map(Math.abs)));
    expect(isKnown(one.encoding, [one.encoding.split("-")[0]])).toBe(true);
  });
  test.each(given.invalid as Case[])("$name", async ({ encoding, hex: bytes, elements, code }) => {
    expect(await codeOf(() => findEncoding(encoding).check(hex(bytes), elements))).toBe(code);
  });
  test.each(given.deltas as Case[])("$name", async ({ base, hex: delta, vector }) => {
    expect(toHex(await applyDelta(hex(base), hex(delta)))).toBe(vector);
  });
  test.each(given.invalid_deltas as Case[])("$name", async ({ base, hex: delta, code }) => {
    expect(await codeOf(() => applyDelta(hex(base), hex(delta)))).toBe(code);
  });
  test("half precision: each one comes back, and what is between two goes to the nearest", () => {
    const float16 = findEncoding("float16");
    const all = new Uint8Array(2 * 0x7c00);
    for (let half = 0; half < 0x7c00; half++) new DataView(all.buffer).setUint16(2 * half, half, true);
    const values = float16.decode(all);
    expect(toHex(float16.encode(values))).toBe(toHex(all));
    expect(values.every((value, half) => half === 0 || value > values[half - 1]!)).toBe(true);
    const between = Float32Array.from({ length: 0x7bff }, (_, half) => (values[half]! + values[half + 1]!) / 2);
    const rounded = new Uint16Array(float16.encode(between).buffer);
    expect(rounded.every((half, place) => half === place + (place % 2))).toBe(true); // ties go to the even one
  });
  test("an element that a half cannot hold is refused", async () => {
    expect(await codeOf(() => findEncoding("float16").encode(Float32Array.of(65520)))).toBe("out-of-range");
    expect(await codeOf(() => findEncoding("bfloat16").encode(Float32Array.of(3.4e38)))).toBe("out-of-range");
    expect(await codeOf(() => findEncoding("int8").encode(Float32Array.of(Number.NaN)))).toBe("not-finite");
  });
});

describe("manifest.json", () => {
  const { valid, accepted, invalid } = vectors("manifest.json");
  const bytes = new TextEncoder().encode(valid.text);
  test("the valid one", () => {
    const manifest = readManifest(bytes);
    expect(sha256(bytes)).toBe(valid.sha256);
    expect(manifest).toMatchObject({ size: valid.elements, localSize: valid.local_elements });
    expect(manifest).toMatchObject(JSON.parse(valid.text));
  });
  test.each(accepted as Case[])("$name", (one) => {
    const fields = { ...JSON.parse(valid.text), ...one.change };
    const manifest = readManifest(new TextEncoder().encode(JSON.stringify(fields)));
    expect(manifest.version).toBe(fields.version);
  });
  test.each(invalid as Case[])("$name", async (one) => {
    let given: Uint8Array;
    if ("change" in one || "without" in one) {
      const fields = { ...JSON.parse(valid.text), ...one.change };
      delete fields[one.without];
      given = new TextEncoder().encode(JSON.stringify(fields));
    } else {
      given = content(one);
    }
    expect(await codeOf(() => readManifest(given))).toBe(one.code);
  });
});

test("the CRC-32 and the SHA-256 of other bytes", () => {
  expect(crc32(new TextEncoder().encode("123456789"))).toBe(0xcbf43926);
  expect(crc32(new Uint8Array(0))).toBe(0);
  for (const [length, digest] of [
    [0, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"],
    [55, "02779466cdec163811d078815c633f21901413081449002f24aa3e80f0b88ef7"],
    [56, "d4817aa5497628e7c77e6b606107042bbba3130888c5f47a375e6179be789fbb"],
    [64, "f5a5fd42d16a20302798ef6ed309979b43003d2320d9f0e8ea9831a92759fb4b"],
  ] as const) {
    expect(sha256(new Uint8Array(length)), `${length} zeros`).toBe(digest);
  }
});
