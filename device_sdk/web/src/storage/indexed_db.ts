/** A store in the browser's IndexedDB. */

import { type Store, StoreError } from "./store.ts";

const VALUES = "values";

/** Open, or make, the database of this name. Rejects with StoreError. */
export async function openIndexedDb(name = "fleetlearn"): Promise<Store> {
  const request = indexedDB.open(name, 1);
  request.onupgradeneeded = () => request.result.createObjectStore(VALUES);
  const database = await result(request);
  // Another tab that erases the database, or opens a later version of it, waits for this one to close.
  database.onversionchange = () => database.close();
  return new IndexedDbStore(database);
}

class IndexedDbStore implements Store {
  readonly #database: IDBDatabase;

  constructor(database: IDBDatabase) {
    this.#database = database;
  }

  async read(key: string): Promise<Uint8Array | undefined> {
    const found = await result(this.#begin("readonly", true).get(key));
    return found === undefined ? undefined : new Uint8Array(found as ArrayBuffer);
  }

  async write(changes: Readonly<Record<string, Uint8Array | null>>, durable = true): Promise<void> {
    const values = this.#begin("readwrite", durable);
    const { transaction } = values;
    const done = new Promise<void>((resolve, reject) => {
      transaction.oncomplete = () => resolve();
      transaction.onabort = () => reject(storeError(transaction.error));
    });
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

  close(): void {
    this.#database.close();
  }

  #begin(mode: IDBTransactionMode, durable: boolean): IDBObjectStore {
    try {
      const transaction = this.#database.transaction(VALUES, mode, { durability: durable ? "strict" : "relaxed" });
      return transaction.objectStore(VALUES);
    } catch (error) {
      throw storeError(error); // the database is closed: the browser, or the user, deletes it
    }
  }
}

function result<T>(request: IDBRequest<T>): Promise<T> {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(storeError(request.error));
  });
}

function storeError(error: unknown): StoreError {
  const { name = "Error", message = "" } = (error ?? {}) as Partial<DOMException>;
  const full = name === "QuotaExceededError";
  const advice = full ? ": the browser gives this page no more room; free some on the device" : "";
  return new StoreError(`the browser's database failed (${name} ${message})${advice}`, full);
}
