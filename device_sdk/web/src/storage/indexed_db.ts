/** A store in the browser's IndexedDB. */

import { type Claim, claimLock } from "./claim.ts";
import { StoreError } from "./errors.ts";
import type { Store } from "./store.ts";

const VALUES = "values";
const LOST =
  "the browser deleted this page's data, and with them the device: load the page again to make a new one, which needs a " +
  "token where devices are enrolled";

/** Open, or make, the database of this name. Rejects with StoreError; `refused`: the browser gives the page none. */
export async function openIndexedDb(name = "fleetlearn"): Promise<Store> {
  let request: IDBOpenDBRequest;
  try {
    request = indexedDB.open(name, 1);
  } catch (error) {
    throw refused(error);
  }
  request.onupgradeneeded = () => request.result.createObjectStore(VALUES);
  const database = await result(request).catch((error: StoreError) => {
    throw error.reason === "full" ? error : refused(error);
  });
  return new IndexedDbStore(database);
}

/** Ask the browser not to delete this page's data by itself when room is short. Some ask the person. Returns whether it
 * agrees. For a page: a worker cannot ask. */
export async function keepStorage(): Promise<boolean> {
  return (await globalThis.navigator.storage?.persist?.().catch(() => false)) ?? false;
}

class IndexedDbStore implements Store {
  readonly #database: IDBDatabase;
  #lost: ((error: StoreError) => void) | undefined;

  constructor(database: IDBDatabase) {
    this.#database = database;
    database.onclose = () => this.#gone();
    // Another page that deletes the database waits for this one to close.
    database.onversionchange = () => {
      database.close();
      this.#gone();
    };
  }

  async read(key: string): Promise<Uint8Array | undefined> {
    const content = await result(this.#begin("readonly", true).get(key));
    return content === undefined ? undefined : new Uint8Array(content as ArrayBuffer);
  }

  async write(changes: Readonly<Record<string, Uint8Array | null>>, durable = true): Promise<void> {
    const values = this.#begin("readwrite", durable);
    const done = ended(values.transaction);
    for (const [key, value] of Object.entries(changes)) {
      if (value === null) values.delete(key);
      else values.put(value.slice().buffer, key);
    }
    await done;
  }

  async keys(prefix: string): Promise<string[]> {
    const range = IDBKeyRange.bound(prefix, `${prefix}\uffff`);
    return (await result(this.#begin("readonly", true).getAllKeys(range))) as string[];
  }

  async keepFirst(key: string, value: Uint8Array): Promise<Uint8Array> {
    return new Uint8Array(await this.#keepFirst<ArrayBuffer>(key, value.slice().buffer as ArrayBuffer));
  }

  async keyPair(key: string, pair?: CryptoKeyPair): Promise<CryptoKeyPair | undefined> {
    if (pair !== undefined) return this.#keepFirst(key, pair);
    return result(this.#begin("readonly", true).get(key));
  }

  /** Two tabs that make a value at one moment both get the first: this is one transaction. */
  async #keepFirst<T>(key: string, value: T): Promise<T> {
    const values = this.#begin("readwrite", true);
    const done = ended(values.transaction);
    const kept: T | undefined = await result(values.get(key));
    if (kept === undefined) values.put(value, key);
    await done;
    return kept ?? value;
  }

  async claim(how: Claim): Promise<() => void> {
    const release = await claimLock(`${this.#database.name} of fleetlearn`, how);
    this.#lost = how.lost;
    return () => {
      this.#lost = undefined;
      release();
    };
  }

  close(): void {
    this.#database.close();
  }

  #gone(): void {
    this.#lost?.(new StoreError(LOST, "lost"));
  }

  #begin(mode: IDBTransactionMode, durable: boolean): IDBObjectStore {
    try {
      const transaction = this.#database.transaction(VALUES, mode, { durability: durable ? "strict" : "relaxed" });
      return transaction.objectStore(VALUES);
    } catch {
      throw new StoreError(LOST, "lost"); // the database is closed
    }
  }
}

function ended(transaction: IDBTransaction): Promise<void> {
  return new Promise<void>((resolve, reject) => {
    transaction.oncomplete = () => resolve();
    transaction.onabort = () => reject(storeError(transaction.error));
  });
}

function result<T>(request: IDBRequest<T>): Promise<T> {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(storeError(request.error));
  });
}

function refused(error: unknown): StoreError {
  const text =
    `the browser gives this page no database (${(error as Error).message}), as some do in private windows or where all ` +
    "cookies are blocked: allow this page to keep data, or serve with a store in memory, which lasts as long as the page";
  return new StoreError(text, "refused");
}

function storeError(error: unknown): StoreError {
  const { name = "Error", message = "" } = (error ?? {}) as Partial<DOMException>;
  const full = name === "QuotaExceededError";
  const advice = full ? ": the browser gives this page no more room; free some on the device" : "";
  return new StoreError(`the browser's database failed (${name} ${message})${advice}`, full ? "full" : "failed");
}
