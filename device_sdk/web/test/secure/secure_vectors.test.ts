import { describe, expect, test } from "vitest";
import { readFromCoordinator } from "../../src/protocol/messages.ts";
import { aboutUpdate, signedSeed } from "../../src/secure/about.ts";
import { publicKeyOf, sign } from "../../src/secure/ed25519.ts";
import { weightedWords } from "../../src/secure/fixed_point.ts";
import { maskUpdate, packed } from "../../src/secure/masking.ts";
import { addMask } from "../../src/secure/masks.ts";
import { seal } from "../../src/secure/sealed.ts";
import { type MaskedTask, termsOf, trainingDigest, updateOf } from "../../src/secure/task_terms.ts";
import { type Case, hex, toHex, vectors } from "../support/vectors.ts";

const given = vectors("secure.json");

function floats(digits: string): Float32Array {
  return new Float32Array(hex(digits).buffer);
}

/** Return the function that gives these fractions, one after the other. */
function drawing(fractions: number[]): () => number {
  const left = [...fractions];
  return () => left.shift()!;
}

test.each(given.words as Case[])("words: $name", ({ update, bound, bits, fractions, words }) => {
  const made = weightedWords(floats(update), 1, bound, bits, drawing([...fractions, 0]));
  expect([...made]).toEqual([...words, 2 ** bits - 1]);
});

test.each(given.masks as Case[])("masks: $name", ({ seed, mask }) => {
  const words = new Uint32Array(mask.length);
  addMask(words, hex(seed));
  expect([...words]).toEqual(mask);
});

test.each(given.masked as Case[])("masked: $name", ({ words, seed, masked }) => {
  const sum = Uint32Array.from(words as number[]);
  addMask(sum, hex(seed));
  expect([...sum]).toEqual(masked);
});

test.each(given.sums as Case[])("sums: $name", ({ bound, bits, reports, masked }) => {
  const total = new Uint32Array(masked.length);
  for (const { update, share, words, fractions, seed, part } of reports as Case[]) {
    const made = weightedWords(floats(update), share, bound, bits, drawing(fractions));
    expect([...made]).toEqual(words);
    addMask(made, hex(seed));
    expect(toHex(packed(made, bits))).toBe(part);
    made.forEach((word, place) => {
      total[place]! += word;
    });
  }
  expect([...total]).toEqual(masked);
});

describe("what a seed is sealed about and how it is signed", () => {
  test.each(given.about as Case[])("about: $name", ({ bytes, one_model, ...one }) => {
    expect(toHex(aboutUpdate({ ...one, oneModel: one_model }, one))).toBe(bytes);
  });
  test.each(given.sealed as Case[])("sealed: $name", ({ content, one_use, public: recipient, about, sealed }) => {
    expect(toHex(seal(hex(content), hex(recipient), hex(about), hex(one_use)))).toBe(sealed);
  });
  test.each(given.signed as Case[])("signed: $name", ({ about, sealed, bytes, secret, public: key, signature }) => {
    const content = signedSeed(hex(about), hex(sealed));
    expect(toHex(content)).toBe(bytes);
    expect(toHex(publicKeyOf(hex(secret)))).toBe(key);
    expect(toHex(sign(hex(secret), content))).toBe(signature);
  });
  test.each(given.training as Case[])("training: $name", ({ task, device, size, digest, about }) => {
    const read = readFromCoordinator(JSON.stringify(task)) as MaskedTask;
    expect(trainingDigest(read)).toBe(digest);
    expect(toHex(aboutUpdate(termsOf(read, size), updateOf(read, device)))).toBe(about);
  });
});

test.each(given.uploads as Case[])("uploads: $name", async (one) => {
  const fractions = new Uint32Array(one.words.length);
  addMask(fractions, hex(one.rounding));
  const draws = {
    fraction: drawing(Array.from(fractions, (word) => word / 2 ** 32)),
    seed: hex(one.seed),
    oneUse: hex(one.one_use),
  };
  const signing = async (content: Uint8Array): Promise<Uint8Array> => sign(hex(one.secret), content);
  const made = await maskUpdate(floats(one.update), one, hex(one.about), hex(one.helper), signing, draws);
  expect([toHex(made.content), made.sealed, made.signature]).toEqual([one.part, one.sealed, one.signature]);
});
