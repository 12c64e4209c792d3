/** A store in a folder, for tests in Node: index.json says which file has the value of each key. */

import {
  closeSync,
  fsyncSync,
  mkdirSync,
  openSync,
  readdirSync,
  readFileSync,
  renameSync,
  rmSync,
  writeSync,
} from "node:fs";
import { join } from "node:path";
import type { Store } from "../../src/storage/store.ts";

export class FolderStore implements Store {
  readonly #folder: string;
  /** Key -> the file's name. */
  #index: Record<string, string>;
  #next: number;

  constructor(folder: string) {
    this.#folder = folder;
    mkdirSync(folder, { recursive: true });
    const files = readdirSync(folder);
    this.#index = files.includes("index.json") ? JSON.parse(readFileSync(join(folder, "index.json"), "utf8")) : {};
    const used = new Set([...Object.values(this.#index), "index.json"]);
    for (const file of files) if (!used.has(file)) rmSync(join(folder, file)); // of a write that did not end
    this.#next = 1 + Math.max(0, ...Object.values(this.#index).map(Number));
  }

  async read(key: string): Promise<Uint8Array | undefined> {
    const file = this.#index[key];
    return file === undefined ? undefined : new Uint8Array(readFileSync(join(this.#folder, file)));
  }

  async write(changes: Readonly<Record<string, Uint8Array | null>>, durable = true): Promise<void> {
    const index = { ...this.#index };
    for (const [key, value] of Object.entries(changes)) {
      delete index[key];
      if (value === null) continue;
      index[key] = String(this.#next++);
      this.#writeFile(index[key], value, durable);
    }
    this.#writeFile("index.draft", new TextEncoder().encode(JSON.stringify(index)), durable);
    renameSync(join(this.#folder, "index.draft"), join(this.#folder, "index.json"));
    const used = new Set(Object.values(index));
    const useless = Object.values(this.#index).filter((file) => !used.has(file));
    this.#index = index;
    for (const file of useless) rmSync(join(this.#folder, file));
  }

  async keys(prefix: string): Promise<string[]> {
    const keys = Object.keys(this.#index).filter((key) => key.startsWith(prefix));
    return keys.sort();
  }

  close(): void {}

  #writeFile(name: string, content: Uint8Array, durable: boolean): void {
    const file = openSync(join(this.#folder, name), "w");
    writeSync(file, content);
    if (durable) fsyncSync(file);
    closeSync(file);
  }
}
