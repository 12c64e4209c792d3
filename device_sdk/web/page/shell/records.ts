/** What the page itself keeps on this device: the drawings, and what the person chose. The SDK has another database. */

import type { Stroke } from "../draw/preprocess.ts";

export interface Drawing {
  readonly id: number;
  readonly label: number;
  readonly strokes: readonly Stroke[];
  /** What the model reads: 64 values from 0 to 16. */
  readonly pixels: Uint8Array;
}

export interface Choices {
  /** The coordinator that the person agreed to join, or null. */
  readonly joined: string | null;
  /** Until the coordinator has taken it. */
  readonly token: string | null;
  /** Training was started and not ended; a page that is loaded again goes on. */
  readonly training: boolean;
  readonly paused: boolean;
  /** The coordinator has let this device in. */
  readonly admitted: boolean;
  /** A drawing was deleted, and a finished update from before may still wait to be sent: it must not be. */
  readonly discard: boolean;
  readonly awake: boolean;
  /** Train only while the device charges, and only where the network costs nothing. */
  readonly charging: boolean;
  readonly unmetered: boolean;
  /** Updates of this device that were accepted since it joined, and their bytes. */
  readonly accepted: number;
  readonly acceptedBytes: number;
}

export const NOTHING_CHOSEN: Choices = {
  joined: null,
  token: null,
  training: false,
  paused: false,
  admitted: false,
  discard: false,
  awake: false,
  charging: false,
  unmetered: false,
  accepted: 0,
  acceptedBytes: 0,
};

export interface Records {
  /** False where the browser keeps nothing, as in some private windows: then all is in memory. */
  readonly lasting: boolean;
  drawings(): Promise<Drawing[]>;
  add(drawing: Omit<Drawing, "id">): Promise<void>;
  remove(id: number): Promise<void>;
  choices(): Promise<Choices>;
  /** Change the choices as they are now, whatever tab made them, and return them. */
  choose(change: (now: Choices) => Choices): Promise<Choices>;
  /** Delete all drawings and choices. */
  clear(): Promise<void>;
  /** Delete the database. The records are of no use afterwards. */
  erase(): Promise<void>;
  /** Call this when another tab, or the browser, deleted the records. */
  onGone(gone: () => void): void;
}

const DATABASE = "fleetlearn-page";

/** Open the page's database; where the browser has none for it, records in memory. */
export async function openRecords(): Promise<Records> {
  try {
    const request = indexedDB.open(DATABASE, 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore("drawings", { keyPath: "id", autoIncrement: true });
      request.result.createObjectStore("choices");
    };
    const database = await done(request);
    return lastingRecords(database);
  } catch {
    return recordsInMemory();
  }
}

function lastingRecords(database: IDBDatabase): Records {
  const store = (name: string, mode: IDBTransactionMode): IDBObjectStore =>
    database.transaction(name, mode).objectStore(name);
  let gone = (): void => {};
  database.onclose = () => gone(); // the browser deleted it
  database.onversionchange = ({ newVersion }) => {
    database.close();
    if (newVersion === null) gone(); // another tab deletes it, and waits for this one to let go
  };
  return {
    lasting: true,
    drawings: async () => done(store("drawings", "readonly").getAll() as IDBRequest<Drawing[]>),
    add: async (drawing) => written(store("drawings", "readwrite"), (drawings) => drawings.add(drawing)),
    remove: async (id) => written(store("drawings", "readwrite"), (drawings) => drawings.delete(id)),
    choices: async () => ({ ...NOTHING_CHOSEN, ...(await done(store("choices", "readonly").get("now"))) }),
    choose: async (change) => {
      let chosen = NOTHING_CHOSEN;
      await written(store("choices", "readwrite"), (all) => {
        const request = all.get("now");
        request.onsuccess = () => {
          chosen = change({ ...NOTHING_CHOSEN, ...request.result });
          all.put(chosen, "now");
        };
      });
      return chosen;
    },
    clear: async () => {
      const transaction = database.transaction(["drawings", "choices"], "readwrite");
      for (const name of ["drawings", "choices"]) transaction.objectStore(name).clear();
      await committed(transaction);
    },
    erase: async () => {
      database.close();
      await deleteDatabase(DATABASE);
    },
    onGone: (call) => {
      gone = call;
    },
  };
}

function recordsInMemory(): Records {
  const drawings = new Map<number, Drawing>();
  let choices = NOTHING_CHOSEN;
  let last = 0;
  const clear = async (): Promise<void> => {
    drawings.clear();
    choices = NOTHING_CHOSEN;
  };
  return {
    lasting: false,
    drawings: async () => [...drawings.values()],
    add: async (drawing) => {
      last += 1;
      drawings.set(last, { ...drawing, id: last });
    },
    remove: async (id) => {
      drawings.delete(id);
    },
    choices: async () => choices,
    choose: async (change) => {
      choices = change(choices);
      return choices;
    },
    clear,
    erase: clear,
    onGone: () => {}, // nobody else can reach them
  };
}

/** Delete a database. Resolves also where another tab holds it open: the browser deletes it when that tab lets go. */
export function deleteDatabase(name: string): Promise<void> {
  return new Promise((resolve, reject) => {
    const request = indexedDB.deleteDatabase(name);
    request.onsuccess = () => resolve();
    request.onblocked = () => resolve();
    request.onerror = () => reject(request.error);
  });
}

function done<T>(request: IDBRequest<T>): Promise<T> {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

/** Change a store, and resolve when the change is written. */
function written(store: IDBObjectStore, change: (store: IDBObjectStore) => void): Promise<void> {
  change(store);
  return committed(store.transaction);
}

function committed(transaction: IDBTransaction): Promise<void> {
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve();
    transaction.onabort = () => reject(transaction.error);
  });
}
