/** Where a device keeps what outlives its page or process: values by key. */

import type { Claim } from "./claim.ts";

export interface Store {
  /** Return the value, or undefined where there is none. */
  read(key: string): Promise<Uint8Array | undefined>;
  /**
   * Write these values, and delete those that are null: all, or none. Once the promise resolves they outlive the process;
   * with `durable` false they may be lost if the machine loses power soon. Rejects with StoreError.
   */
  write(changes: Readonly<Record<string, Uint8Array | null>>, durable?: boolean): Promise<void>;
  /** Return the keys that begin so, in order. */
  keys(prefix: string): Promise<string[]>;
  /** Write the value unless the key has one, as one step; returns the value that the key has then. Left out: nobody else
   * writes to the store. */
  keepFirst?(key: string, value: Uint8Array): Promise<Uint8Array>;
  /** The same for a pair of keys that cannot be exported. Without a pair: returns what there is. Left out: the store keeps
   * bytes alone. */
  keyPair?(key: string, pair?: CryptoKeyPair): Promise<CryptoKeyPair | undefined>;
  /** Wait until no other tab or worker uses the store. Returns a function that gives it back. Left out: nobody else can. */
  claim?(how: Claim): Promise<() => void>;
  close(): void;
}

/** Write the value unless the key has one; returns the value that the key has then. Rejects with StoreError. */
export async function keepFirst(store: Store, key: string, value: Uint8Array): Promise<Uint8Array> {
  if (store.keepFirst !== undefined) return store.keepFirst(key, value);
  const kept = await store.read(key);
  if (kept === undefined) await store.write({ [key]: value });
  return kept ?? value;
}

/** A store in memory, for pages that are to leave nothing behind, and for tests. */
export class MemoryStore implements Store {
  readonly #values = new Map<string, Uint8Array>();

  async read(key: string): Promise<Uint8Array | undefined> {
    return this.#values.get(key)?.slice();
  }

  async write(changes: Readonly<Record<string, Uint8Array | null>>): Promise<void> {
    for (const [key, value] of Object.entries(changes)) {
      if (value === null) this.#values.delete(key);
      else this.#values.set(key, value.slice());
    }
  }

  async keys(prefix: string): Promise<string[]> {
    return [...this.#values.keys()].filter((key) => key.startsWith(prefix)).sort();
  }

  close(): void {}
}

/** Take the store from whoever has it, and delete all that it has. Rejects with StoreError. */
export async function eraseStore(store: Store): Promise<void> {
  const release = await store.claim?.({ steal: true });
  try {
    const keys = await store.keys("");
    await store.write(Object.fromEntries(keys.map((key) => [key, null])));
  } finally {
    release?.();
  }
}

const decoder = new TextDecoder();

/** Return a JSON value that the store has, or undefined where there is none or it is damaged. */
export async function readJson(store: Store, key: string): Promise<unknown> {
  const content = await store.read(key);
  if (content === undefined) return undefined;
  try {
    return JSON.parse(decoder.decode(content));
  } catch {
    return undefined;
  }
}

/** Return the value as a store keeps it. */
export function json(value: unknown): Uint8Array {
  return new TextEncoder().encode(JSON.stringify(value));
}
