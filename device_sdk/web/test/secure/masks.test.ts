import { createCipheriv } from "node:crypto";
import { expect, test } from "vitest";
import { addMask } from "../../src/secure/masks.ts";
import { seal } from "../../src/secure/sealed.ts";

test("a mask that is made in parts is OpenSSL's whole stream", () => {
  const seed = Uint8Array.from({ length: 32 }, (_, place) => 7 * place);
  const size = 2 ** 17 + 5;
  const stream = createCipheriv("chacha20", seed, new Uint8Array(16)).update(new Uint8Array(4 * size));
  const words = new Uint32Array(size).fill(2 ** 32 - 1);
  addMask(words, seed);
  // Added to 2^32 - 1, each number is one less.
  const expected = new Uint32Array(stream.buffer.slice(stream.byteOffset, stream.byteOffset + 4 * size));
  expect(words).toEqual(expected.map((number) => number - 1));
});

test("a seed has 32 bytes", () => {
  expect(() => addMask(new Uint32Array(3), new Uint8Array(31))).toThrow();
});

test("nothing is sealed for a key of small order, and two seals of one content differ", () => {
  const content = new Uint8Array(32);
  expect(() => seal(content, new Uint8Array(32), content)).toThrow();
  const recipient = new Uint8Array(32).fill(9);
  const made = [seal(content, recipient, content), seal(content, recipient, content)];
  expect(made.map((sealed) => sealed.length)).toEqual([80, 80]);
  expect(made[0]).not.toEqual(made[1]);
});
