/** What leaves the device of a masked update, opened as its helper does, with Node's own cryptography (OpenSSL). */

import {
  createCipheriv,
  createDecipheriv,
  createPrivateKey,
  createPublicKey,
  diffieHellman,
  hkdfSync,
  type KeyObject,
  verify,
} from "node:crypto";
import { describe, expect, test } from "vitest";
import { crc32 } from "../../src/protocol/crc32.ts";
import { fromHex, toHex } from "../../src/protocol/hex.ts";
import { encode, readFromCoordinator } from "../../src/protocol/messages.ts";
import { aboutUpdate, lengthPrefixed, signedSeed } from "../../src/secure/about.ts";
import { type MaskedTask, termsOf, updateOf } from "../../src/secure/task_terms.ts";
import { deviceKey } from "../../src/storage/device_key.ts";
import { MemoryStore } from "../../src/storage/store.ts";
import { Masker } from "../../src/training/masker.ts";
import { vectors } from "../support/vectors.ts";

const { training, sealed } = vectors("secure.json");
const [, plain, short] = (training as { task: object }[]).map(({ task }) => readFromCoordinator(JSON.stringify(task)));
const TASK = plain as MaskedTask;
const [{ private: HELPER }] = sealed;

/** The keys of 32 bytes as Node takes them: RFC 8410 puts a fixed beginning before them. */
const privateKey = (raw: string): KeyObject =>
  createPrivateKey({ key: Buffer.from(`302e020100300506032b656e04220420${raw}`, "hex"), format: "der", type: "pkcs8" });
const publicKey = (raw: string, algorithm: "6e" | "70"): KeyObject =>
  createPublicKey({ key: Buffer.from(`302a300506032b65${algorithm}032100${raw}`, "hex"), format: "der", type: "spki" });

function open(closed: Uint8Array, about: Uint8Array): Uint8Array {
  const key = toHex(closed.subarray(0, 32));
  const shared = diffieHellman({ privateKey: privateKey(HELPER), publicKey: publicKey(key, "6e") });
  const label = new TextEncoder().encode("fleetlearn.v1 sealed");
  const info = lengthPrefixed([label, about, fromHex(key), fromHex(TASK.secure.helper)]);
  const secret = new Uint8Array(hkdfSync("sha256", shared, new Uint8Array(0), info, 32));
  const decipher = createDecipheriv("chacha20-poly1305", secret, new Uint8Array(12), { authTagLength: 16 });
  decipher.setAAD(about, { plaintextLength: 32 });
  decipher.setAuthTag(closed.subarray(-16));
  return Buffer.concat([decipher.update(closed.subarray(32, -16)), decipher.final()]);
}

/** Return the words without the mask of this seed. */
function unmask(content: Uint8Array, seed: Uint8Array): number[] {
  const stream = createCipheriv("chacha20", seed, new Uint8Array(16)).update(new Uint8Array(content.length));
  const [words, mask] = [content, stream].map((bytes) => new Uint32Array(bytes.slice().buffer)) as [
    Uint32Array,
    Uint32Array,
  ];
  return [...words.map((word, place) => word - mask[place]!)];
}

describe("a masked update", () => {
  const store = new MemoryStore();
  const masker = new Masker(store, "camera-7");
  const update = Float32Array.of(0.3, -0.25, 0, 0.1);
  const about = aboutUpdate(termsOf(TASK, 5), updateOf(TASK, "camera-7"));

  test("is the update, once its helper's seed is known, and is signed with the device's own key", async () => {
    await masker.prepare(TASK);
    const { report, content } = await masker.mask(TASK, update, 0.5, 0.5);
    expect(report.parts).toEqual([{ name: "update", encoding: "masked", size: 20, crc32: crc32(content) }]);
    const words = unmask(content, open(fromHex(report.sealed!), about));
    const step = (2 * TASK.clip) / (2 ** 20 - 1);
    words.slice(0, 4).forEach((word, place) => {
      expect(Math.abs(word * step - TASK.clip - 0.25 * update[place]!)).toBeLessThan(step);
    });
    expect(Math.abs(words[4]! / (2 ** 20 - 1) - 0.5)).toBeLessThan(2 ** -20);
    const { publicKey: own } = await deviceKey(store);
    const signedContent = signedSeed(about, fromHex(report.sealed!));
    expect(verify(null, signedContent, publicKey(own, "70"), fromHex(report.signature!))).toBe(true);
  });

  test("says nothing that was measured, and is one that the coordinator takes", async () => {
    const { report } = await masker.mask(TASK, update, 1, 1);
    expect(report).toMatchObject({ examples: 1, steps: 1, epochs: 2, loss: 0, metrics: {}, seconds: 0, clipped: null });
    expect(report).toMatchObject({ complete: true, evaluation: null, personal: null, lost_tied: false });
    expect(() => encode(report)).not.toThrow();
  });

  test("has another mask, seed and rounding each time", async () => {
    const made = await Promise.all([1, 2].map(() => masker.mask(TASK, update, 1, 1)));
    expect(made[0]!.content).not.toEqual(made[1]!.content);
    expect(made[0]!.report.sealed).not.toBe(made[1]!.report.sealed);
    const many = new Float32Array(2000).fill(0.1);
    const long = aboutUpdate(termsOf(TASK, 2001), updateOf(TASK, "camera-7"));
    const plain = async (): Promise<number[]> => {
      const { report, content } = await masker.mask(TASK, many, 1, 1);
      return unmask(content, open(fromHex(report.sealed!), long));
    };
    expect(await plain()).not.toEqual(await plain());
  });

  test("of 12 bits has the lower three bytes of each word", async () => {
    const task = short as MaskedTask;
    const { report, content } = await masker.mask(task, update, 1, 1);
    expect(report.parts).toEqual([{ name: "update", encoding: "masked24", size: 15, crc32: crc32(content) }]);
    const whole = new Uint8Array(20);
    for (let place = 0; place < 5; place++) whole.set(content.subarray(3 * place, 3 * place + 3), 4 * place);
    const seed = open(fromHex(report.sealed!), aboutUpdate(termsOf(task, 5), updateOf(task, "camera-7")));
    const words = unmask(whole, seed).map((word) => word & 0xffffff);
    const step = (2 * task.clip) / 4095;
    words.slice(0, 4).forEach((word, place) => {
      expect(Math.abs(word * step - task.clip - update[place]!)).toBeLessThan(step);
    });
    expect(words[4]).toBe(4095);
  });

  test("has a factor above 0 and at most 1", async () => {
    for (const factor of [0, -1, 1.01, Number.NaN]) {
      await expect(masker.mask(TASK, update, 1, factor)).rejects.toThrow("expected above 0 and at most 1");
    }
  });

  test("is for a helper's key that only its holder can open", async () => {
    const secure = { ...TASK.secure, helper: "00".repeat(32) };
    await expect(masker.prepare({ ...TASK, secure })).rejects.toMatchObject({ code: "unsupported" });
  });
});
