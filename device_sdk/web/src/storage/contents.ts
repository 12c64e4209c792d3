/**
 * What was downloaded, by SHA-256.
 *
 *     file/SHA              manifests and files of bundles; those of the last MAX_BUNDLES bundles used
 *     model/SHA             the last task's vectors, such as the round's model
 *     partial/SHA/OFFSET    the chunks of a content that is still arriving, OFFSET with leading zeros
 *     bundles               the manifests' SHA-256, the last used first, as JSON
 *     newest                the bundle and the model of the last task that was begun, as JSON
 *
 * A content is checked against its SHA-256 when it has arrived, and again when a process first uses it.
 */

import { applyDelta, joined } from "../protocol/deltas.ts";
import { ProtocolError } from "../protocol/errors.ts";
import {
  EVAL,
  FROZEN,
  INFER,
  MAX_MANIFEST_BYTES,
  type Manifest,
  PARAMETERS,
  readManifest,
  STATE,
  TRAIN,
} from "../protocol/manifest.ts";
import type { Question, Task, VectorReference } from "../protocol/messages.ts";
import { sha256 } from "../protocol/sha256.ts";
import type { Wanted } from "../session/commands.ts";
import { json, readJson, type Store } from "./store.ts";

const MAX_BUNDLES = 3;
/** Most models that a check-in lists. */
const MAX_MODELS = 8;

/** Return the files of a bundle that a device reads in a round. The initial parameters are needed only where some are
 * personal: the round's model has all others. infer: the model that predicts too. */
export function neededFiles(manifest: Manifest, infer = false): string[] {
  const optional = [FROZEN, STATE].filter((path) => path in manifest.files);
  const personal = manifest.localSize > manifest.size ? [PARAMETERS] : [];
  return [TRAIN, EVAL, ...optional, ...personal, ...(infer ? [INFER] : [])];
}

export class Contents {
  readonly #store: Store;
  /** Keys whose content was checked since the process began. */
  readonly #intact = new Set<string>();

  readonly #infer: boolean;

  /** infer: a bundle's infer.onnx is fetched too. */
  constructor(store: Store, infer = false) {
    this.#store = store;
    this.#infer = infer;
  }

  /** Return a file of a bundle, or a manifest. Throws where it is lost: `lacking` had found it. */
  async file(hash: string): Promise<Uint8Array> {
    return this.#read(`file/${hash}`);
  }

  async vector(hash: string): Promise<Uint8Array> {
    return this.#read(`model/${hash}`);
  }

  /** Return the SHA-256 of the vectors that later ones may come as differences from. */
  async models(): Promise<string[]> {
    return (await this.#store.keys("model/")).map((key) => key.slice("model/".length)).slice(0, MAX_MODELS);
  }

  /** Return the manifest of the bundle that was used last, if it is here. */
  async lastManifest(): Promise<{ sha256: string; size: number } | null> {
    const [sha256] = ((await readJson(this.#store, "bundles")) ?? []) as string[];
    const manifest = sha256 === undefined ? undefined : await this.#store.read(`file/${sha256}`);
    return sha256 === undefined || manifest === undefined ? null : { sha256, size: manifest.length };
  }

  /**
   * Return what the task needs and the device lacks, the manifest first: only the manifest names the other files.
   *
   * Marks the bundle as used last, and deletes what neither this task nor one of the last bundles needs. Rejects with
   * BundleError on a manifest that this version cannot read, and with StoreError.
   */
  async lacking(task: Task | Question): Promise<Wanted[]> {
    const { bundle } = task;
    if (bundle === null) return []; // a question that is answered without a model
    const wanted = [content(`file/${bundle}`, "manifest.json", null, MAX_MANIFEST_BYTES)];
    if (await this.#has(wanted[0]!)) {
      const manifest = readManifest(await this.file(bundle));
      for (const path of neededFiles(manifest, this.#infer)) {
        const entry = manifest.files[path]!;
        wanted.push(content(`file/${entry.sha256}`, path, entry.size));
      }
    }
    for (const { sha256: hash, name, size } of task.vectors) wanted.push(content(`model/${hash}`, `the ${name}`, size));
    await this.#makeRoom(bundle, task.vectors);
    const lacking: Wanted[] = [];
    for (const one of wanted) {
      const known = lacking.some((other) => other.place === one.place); // two vectors may be the same, such as zeros
      if (!known && !(await this.#has(one))) lacking.push(await this.#smaller(one, task.vectors));
    }
    return this.#resume(lacking);
  }

  /** Keep the next bytes of a partial content; `offset` 0 begins it again. Rejects with StoreError. */
  async append(wanted: Wanted, offset: number, payload: Uint8Array): Promise<void> {
    const old = offset === 0 ? await this.#store.keys(`partial/${wanted.sha256}/`) : [];
    const changes = { ...deleted(old), [partialKey(wanted.sha256, offset)]: payload };
    await this.#store.write(changes, false);
  }

  /** Put a complete content, or the vector that a difference gives, in its place. Deletes it and returns false where
   * the SHA-256 is wrong. Rejects with StoreError. */
  async finish(wanted: Wanted): Promise<boolean> {
    const keys = await this.#store.keys(`partial/${wanted.sha256}/`);
    const pieces = await Promise.all(keys.map((key) => this.#store.read(key)));
    let whole: Uint8Array | undefined = joined(pieces.filter((piece) => piece !== undefined));
    if (sha256(whole) !== wanted.sha256) whole = undefined;
    else if (wanted.base !== undefined) whole = await this.#apply(whole, wanted.base, wanted.place);
    await this.#store.write({ ...deleted(keys), ...(whole && { [wanted.place]: whole }) }, false);
    if (whole !== undefined) this.#intact.add(wanted.place);
    return whole !== undefined;
  }

  /** Remember the bundle and the model of a task: the model is one of several vectors. Rejects with StoreError. */
  async setNewest({ bundle, vectors }: Pick<Task, "bundle" | "vectors">): Promise<void> {
    const { sha256: hash, encoding } = vectors.find(({ name }) => name === "model")!;
    await this.#store.write({ newest: json({ bundle, sha256: hash, encoding }) }, false);
  }

  /** Return what `setNewest` was last called with; undefined before the first task. */
  async newest(): Promise<{ bundle: string; sha256: string; encoding: string } | undefined> {
    return (await readJson(this.#store, "newest")) as { bundle: string; sha256: string; encoding: string } | undefined;
  }

  /** Check all contents again when they are needed next: a bundle could not be used. */
  recheck(): void {
    this.#intact.clear();
  }

  async #read(key: string): Promise<Uint8Array> {
    const bytes = await this.#store.read(key);
    if (bytes !== undefined) return bytes;
    this.#intact.delete(key);
    throw new ProtocolError("unknown-content", `${key} is no longer in the store`);
  }

  async #has({ place, sha256: hash }: Wanted): Promise<boolean> {
    if (this.#intact.has(place)) return (await this.#store.keys(place)).includes(place); // a browser may evict it
    const bytes = await this.#store.read(place);
    if (bytes === undefined || sha256(bytes) !== hash) return false;
    this.#intact.add(place);
    return true;
  }

  /** Return the difference that gives this content, if there is one, and the device has what it differs from. */
  async #smaller(wanted: Wanted, vectors: readonly VectorReference[]): Promise<Wanted> {
    const delta = vectors.find((vector) => vector.sha256 === wanted.sha256 && wanted.place.startsWith("model/"))?.delta;
    if (!delta || !(await this.#has(content(`model/${delta.base}`, "the earlier model", 0)))) return wanted;
    const difference = content(`model/${delta.sha256}`, `the difference of ${wanted.name}`, delta.size);
    return { ...difference, place: wanted.place, base: delta.base, instead: wanted };
  }

  async #apply(delta: Uint8Array, base: string, place: string): Promise<Uint8Array | undefined> {
    try {
      const vector = await applyDelta(await this.vector(base), delta);
      return `model/${sha256(vector)}` === place ? vector : undefined;
    } catch (error) {
      if (error instanceof ProtocolError) return undefined;
      throw error;
    }
  }

  /** Return `lacking` with the bytes that arrived before; delete the partial contents that are not in it. */
  async #resume(lacking: readonly Wanted[]): Promise<Wanted[]> {
    const have = new Map<string, number>();
    const useless: string[] = [];
    for (const key of await this.#store.keys("partial/")) {
      const [, hash, offset] = key.split("/") as [string, string, string];
      const before = have.get(hash) ?? 0;
      if (Number(offset) !== before || !lacking.some((one) => one.sha256 === hash)) useless.push(key);
      else have.set(hash, before + ((await this.#store.read(key))?.length ?? 0));
    }
    if (useless.length > 0) await this.#store.write(deleted(useless), false);
    const resumed = (wanted: Wanted): Wanted => {
      const size = have.get(wanted.sha256) ?? 0;
      const instead = wanted.instead && { instead: resumed(wanted.instead) };
      return { ...wanted, ...instead, have: size <= wanted.limit ? size : 0 };
    };
    return lacking.map(resumed);
  }

  async #makeRoom(bundle: string, vectors: readonly VectorReference[]): Promise<void> {
    const before = ((await readJson(this.#store, "bundles")) ?? []) as string[];
    const bundles = [bundle, ...before.filter((hash) => hash !== bundle)].slice(0, MAX_BUNDLES);
    const needed = new Set(bundles.map((hash) => `file/${hash}`));
    for (const hash of bundles) {
      const manifest = await this.#store.read(`file/${hash}`);
      for (const entry of manifest ? filesOf(manifest) : []) needed.add(`file/${entry}`);
    }
    for (const { sha256: hash, delta } of vectors) {
      needed.add(`model/${hash}`);
      if (delta !== null) needed.add(`model/${delta.base}`);
    }
    const present = [...(await this.#store.keys("file/")), ...(await this.#store.keys("model/"))];
    const useless = present.filter((key) => !needed.has(key));
    if (useless.length === 0 && before[0] === bundle) return;
    await this.#store.write({ ...deleted(useless), bundles: json(bundles) }, false);
    for (const key of useless) this.#intact.delete(key);
  }
}

function content(place: string, name: string, size: number | null, limit = size ?? 0): Wanted {
  return { sha256: place.slice(place.indexOf("/") + 1), name, place, size, limit, have: 0 };
}

function filesOf(manifest: Uint8Array): string[] {
  try {
    return Object.values(readManifest(manifest).files).map((entry) => entry.sha256);
  } catch {
    return []; // damaged, or of a later version
  }
}

function partialKey(hash: string, offset: number): string {
  return `partial/${hash}/${String(offset).padStart(12, "0")}`;
}

function deleted(keys: readonly string[]): Record<string, null> {
  return Object.fromEntries(keys.map((key) => [key, null]));
}
