/**
 * The device's own key (Ed25519), by which the helper of secure aggregation knows its masked updates. It is made when it is
 * first needed, and is not the coordinator's business.
 *
 * Where the browser's WebCrypto has Ed25519 (Chromium from 137, Firefox from 129, Safari from 17; on pages that came over
 * HTTPS or from this machine), the private key cannot be exported: no script of the page can read it, though it can sign.
 * Elsewhere 32 random bytes are in the store.
 */

import { toHex } from "../protocol/hex.ts";
import { StoreError } from "./errors.ts";
import { readOrMakeName } from "./identity.ts";
import { keepFirst, type Store } from "./store.ts";

/** The store's names of the bytes, and of the pair of keys that cannot be exported. */
const BYTES = "device-key";
const PAIR = "device-key-pair";

export interface DeviceKey {
  /** The public key, 64 hexadecimal digits. */
  readonly publicKey: string;
  sign(content: Uint8Array<ArrayBuffer>): Promise<Uint8Array>;
}

/** Return the device's key; make it where there is none. Rejects with StoreError. */
export async function deviceKey(store: Store): Promise<DeviceKey> {
  const bytes = await store.read(BYTES);
  if (bytes !== undefined) return ofBytes(bytes);
  const pair = (await store.keyPair?.(PAIR)) ?? (await makePair(store));
  if (pair !== undefined) return ofPair(pair);
  const { newSecret } = await import("../secure/ed25519.ts");
  return ofBytes(await keepFirst(store, BYTES, newSecret()));
}

/**
 * Return the device's line in the roster of a helper: its name and its public key. Makes both where there are none.
 *
 * store: of the device, as `openIndexedDb` opens it, also while the device serves from it in a worker. name: the device's
 * name, as its options have it. Rejects with StoreError.
 */
export async function rosterLine(store: Store, name?: string): Promise<string> {
  const device = await readOrMakeName(store, name);
  return `${device} ${(await deviceKey(store)).publicKey}`;
}

/** Make a pair of keys and keep it. undefined: this browser, page or store cannot. */
async function makePair(store: Store): Promise<CryptoKeyPair | undefined> {
  if (store.keyPair === undefined) return undefined;
  try {
    const made = (await crypto.subtle.generateKey("Ed25519", false, ["sign", "verify"])) as CryptoKeyPair;
    await store.keyPair(PAIR, made);
    // A browser may sign with a new key, and not with one that was in its database.
    const kept = (await store.keyPair(PAIR))!;
    await (await ofPair(kept)).sign(new Uint8Array(1));
    return kept;
  } catch (error) {
    if (error instanceof StoreError) throw error;
    await store.write({ [PAIR]: null });
    return undefined;
  }
}

async function ofPair({ publicKey, privateKey }: CryptoKeyPair): Promise<DeviceKey> {
  return {
    publicKey: toHex(new Uint8Array(await crypto.subtle.exportKey("raw", publicKey))),
    sign: async (content) => new Uint8Array(await crypto.subtle.sign("Ed25519", privateKey, content)),
  };
}

async function ofBytes(secret: Uint8Array): Promise<DeviceKey> {
  const { publicKeyOf, sign } = await import("../secure/ed25519.ts");
  if (secret.length !== 32) {
    const text =
      `the device's own key has ${secret.length} bytes in the store, and is damaged: erase the device to make a new one. ` +
      "The operator of the helper must be told the new key, and revoke the old one";
    throw new StoreError(text);
  }
  return { publicKey: toHex(publicKeyOf(secret)), sign: async (content) => sign(secret, content) };
}
