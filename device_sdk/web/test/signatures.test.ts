/** Signatures: RFC 8032's own, those of the vectors, and browsers that can check none; the keys in the store. */

import { afterEach, expect, test, vi } from "vitest";
import { Device } from "../src/device.ts";
import { findVerifier } from "../src/driver/signatures.ts";
import { signedBytes } from "../src/protocol/signing.ts";
import { readToken } from "../src/storage/identity.ts";
import { MemoryStore } from "../src/storage/store.ts";
import { checkedKeys, readTrustedKeys, trustFirst, writeTrustedKeys } from "../src/storage/trusted_keys.ts";
import { type Case, hex, toHex, vectors } from "./support/vectors.ts";

const { rfc8032, valid, invalid } = vectors("signing.json");
const [KEY, OTHER] = ["ab".repeat(32), "cd".repeat(32)];

afterEach(() => vi.unstubAllGlobals());

test.each(rfc8032 as Case[])("RFC 8032, $name", async (one) => {
  const verify = await findVerifier();
  expect(await verify(one.public, one.signature, Uint8Array.from(hex(one.message)))).toBe(true);
  expect(await verify(one.public, one.signature, Uint8Array.from(hex(`${one.message}00`)))).toBe(false);
});

async function isSigned(one: Case): Promise<boolean> {
  const verify = await findVerifier();
  return verify(one.key, one.signature, signedBytes(one.challenge, one.device, one.message));
}

test.each(valid as Case[])("signed: $name", async (one) => {
  expect(toHex(signedBytes(one.challenge, one.device, one.message))).toBe(one.bytes);
  expect(await isSigned(one)).toBe(true);
});

test.each(invalid as Case[])("not signed: $name", async (one) => {
  expect(await isSigned(one)).toBe(false);
});

test("a key that is no point of the curve signed nothing", async () => {
  expect(await isSigned({ ...valid[0], key: `02${"00".repeat(31)}` })).toBe(false);
});

const data = { x: { values: Float32Array.of(1), shape: [1] } };
const url = "ws://127.0.0.1:1";

test("a device with keys does not start where signatures cannot be checked; one without does not ask", async () => {
  const device = new Device({ url, data, store: new MemoryStore(), keys: [KEY] });
  vi.stubGlobal("crypto", { getRandomValues: crypto.getRandomValues.bind(crypto) });
  await expect(device.serve()).rejects.toThrow("the page must come over HTTPS, or from this machine [bad-version]");
  const importKey = () => Promise.reject(new Error("Unrecognized name."));
  vi.stubGlobal("crypto", { getRandomValues: crypto.getRandomValues, subtle: { importKey } });
  await expect(device.serve()).rejects.toThrow("no Ed25519 (Unrecognized name.): expected Chromium 137");
});

test("a token brings keys, and what is no token or no key is refused without showing it", () => {
  const secret = "s".repeat(43);
  expect(readToken(secret)).toEqual({ secret, keys: [] });
  expect(readToken(`${secret}.${KEY}.${OTHER}`)).toEqual({ secret, keys: [KEY, OTHER] });
  for (const token of ["", secret.slice(1), `${secret}.`, `${secret}.${KEY}0`, `${secret}\n`, `${secret}.${KEY} `]) {
    expect(() => readToken(token)).toThrow(`it has ${token.length} characters`);
  }
  expect(checkedKeys([KEY, OTHER, KEY])).toEqual([KEY, OTHER]);
  expect(() => checkedKeys(["x"])).toThrow("the keys x were given to be trusted; expected at most 8");
  expect(() => checkedKeys(Array.from({ length: 9 }, (_, n) => `${n}0`.repeat(32)))).toThrow(RangeError);
  expect(() => new Device({ url, data, store: new MemoryStore(), keys: ["x"] })).toThrow(RangeError);
});

test("the first keys are kept, and later ones are warned of", async () => {
  const store = new MemoryStore();
  const warnings: string[] = [];
  const warn = (text: string): void => void warnings.push(text);
  expect(await trustFirst(store, [], warn)).toEqual([]);
  expect(await trustFirst(store, [KEY], warn)).toEqual([KEY]);
  expect(await trustFirst(store, [], warn)).toEqual([KEY]);
  expect(await trustFirst(store, [KEY, OTHER], warn)).toEqual([KEY]);
  expect(warnings).toEqual([expect.stringContaining(`trusts ${KEY}, and goes on so: ${OTHER} was given`)]);
  await writeTrustedKeys(store, [OTHER]);
  expect(await readTrustedKeys(store)).toEqual([OTHER]);
});

test.each(["", "{", "{}", '{"keys":[]}', '{"keys":["x"]}'])(
  "damaged keys do not let the device do everything: %s",
  async (text) => {
    const store = new MemoryStore();
    await store.write({ trusted: new TextEncoder().encode(text) });
    await expect(trustFirst(store, [KEY], () => {})).rejects.toThrow("are damaged in its store");
  },
);
