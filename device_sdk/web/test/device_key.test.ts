/** The device's own key: made once, in the store alone, and of the best kind that the browser has. */

import "fake-indexeddb/auto";
import { IDBFactory } from "fake-indexeddb";
import { afterEach, beforeEach, describe, expect, test, vi } from "vitest";
import { fromHex, toHex } from "../src/protocol/hex.ts";
import { deviceKey, rosterLine } from "../src/storage/device_key.ts";
import { openIndexedDb } from "../src/storage/indexed_db.ts";
import { eraseStore, MemoryStore, type Store } from "../src/storage/store.ts";

const CONTENT = new TextEncoder().encode("what is signed");

async function isSigned({ publicKey, sign }: Awaited<ReturnType<typeof deviceKey>>): Promise<boolean> {
  const key = await crypto.subtle.importKey("raw", fromHex(publicKey), "Ed25519", false, ["verify"]);
  return crypto.subtle.verify("Ed25519", key, new Uint8Array(await sign(CONTENT)), CONTENT);
}

let store: Store;
beforeEach(async () => {
  globalThis.indexedDB = new IDBFactory();
  store = await openIndexedDb();
});
afterEach(() => {
  vi.restoreAllMocks();
  vi.unstubAllGlobals();
});

describe("where WebCrypto has Ed25519", () => {
  test("it cannot be exported, and is the same at each start", async () => {
    const made = await deviceKey(store);
    expect(await isSigned(made)).toBe(true);
    expect((await deviceKey(await openIndexedDb())).publicKey).toBe(made.publicKey);
    const pair = await store.keyPair!("device-key-pair");
    expect(pair!.privateKey.extractable).toBe(false);
    expect(await store.read("device-key")).toBeUndefined();
  });
  test("two tabs that make it at one moment have one", async () => {
    const keys = await Promise.all([deviceKey(store), deviceKey(await openIndexedDb()), deviceKey(store)]);
    expect(new Set(keys.map(({ publicKey }) => publicKey)).size).toBe(1);
    expect(await Promise.all(keys.map(isSigned))).toEqual([true, true, true]);
  });
  test("it is gone with the device", async () => {
    const before = await rosterLine(store, "phone-1");
    await eraseStore(store);
    expect(await store.keys("")).toEqual([]);
    expect(await rosterLine(store, "phone-1")).not.toBe(before);
  });
  test("a store that cannot keep it says so", async () => {
    store.close();
    await expect(deviceKey(store)).rejects.toMatchObject({ reason: "lost" });
  });
});

describe("elsewhere it is bytes in the store", () => {
  const LACKING: [string, () => void][] = [
    ["a browser without Ed25519", () => vi.spyOn(crypto.subtle, "generateKey").mockRejectedValue(new Error("unknown"))],
    ["a page without HTTPS", () => vi.stubGlobal("crypto", { getRandomValues: crypto.getRandomValues.bind(crypto) })],
    [
      "a browser that cannot keep such a key",
      () =>
        vi.spyOn(IDBObjectStore.prototype, "put").mockImplementationOnce(() => {
          throw new DOMException("no clone", "DataCloneError");
        }),
    ],
    [
      "a browser that cannot use a key that it kept",
      () => vi.spyOn(crypto.subtle, "sign").mockRejectedValue(new Error("of another database")),
    ],
  ];
  test.each(LACKING)("%s", async (_, lack) => {
    lack();
    const made = await deviceKey(store);
    const again = await deviceKey(await openIndexedDb());
    vi.restoreAllMocks();
    vi.unstubAllGlobals();
    expect(again.publicKey).toBe(made.publicKey);
    expect(await isSigned(again)).toBe(true);
    expect(await store.read("device-key")).toHaveLength(32);
    expect(await store.keyPair!("device-key-pair")).toBeUndefined();
  });
  test("a store in memory", async () => {
    const memory = new MemoryStore();
    const { publicKey } = await deviceKey(memory);
    expect((await deviceKey(memory)).publicKey).toBe(publicKey);
    expect(await memory.read("device-key")).toHaveLength(32);
  });
  test("and is used where WebCrypto has learnt Ed25519 since", async () => {
    const memory = new MemoryStore();
    const { publicKey } = await deviceKey(memory);
    await store.write({ "device-key": (await memory.read("device-key"))! });
    expect((await deviceKey(store)).publicKey).toBe(publicKey);
  });
  test("of RFC 8032, section 7.1, test 1", async () => {
    const secret = fromHex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60");
    await store.write({ "device-key": secret });
    const key = await deviceKey(store);
    expect(key.publicKey).toBe("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a");
    expect(toHex(await key.sign(new Uint8Array(0)))).toMatch(
      /^e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065/,
    );
  });
  test("that are damaged are said to be", async () => {
    await store.write({ "device-key": new Uint8Array(31) });
    await expect(deviceKey(store)).rejects.toThrow("the device's own key has 31 bytes in the store, and is damaged");
  });
});

test("the roster's line has the device's name and its key", async () => {
  const line = await rosterLine(store, "phone-1");
  expect(line).toBe(`phone-1 ${(await deviceKey(store)).publicKey}`);
  expect(await rosterLine(store)).toBe(line);
  await expect(rosterLine(store, "phone-2")).rejects.toThrow("this device is phone-1, not phone-2");
});
