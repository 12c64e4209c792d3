/**
 * The finished update that the coordinator has not acknowledged, and what the device keeps from task to task.
 *
 *     pending/report, pending/parts      the update: its report, and the parts' bytes one after the other. Before it is
 *                                        masked: its task, and the clipped update as float32
 *     pending/share                      of an update that is not masked: its weight, and what checks its bytes, as JSON
 *     masked                             the last tasks whose updates were masked, as JSON
 *     pending/room/PLACE                 what tries whether there is room; gone before training
 *     kept/BUNDLE                        the kept state (kept_state.ts) after the last task of a bundle
 *     personal/BUNDLE                    the personal model after the last task, where an algorithm has one
 *     tied/BUNDLE/TASK/NAME              the tied vectors that a task made
 *     training                           the task in training, and how often its training was begun, as JSON
 *
 * One write makes an update and all that is kept with it exist together.
 */

import { crc32 } from "../protocol/crc32.ts";
import { joined } from "../protocol/deltas.ts";
import { findEncoding } from "../protocol/encodings.ts";
import { packChunk } from "../protocol/frames.ts";
import { type Report, readFromCoordinator, readFromDevice, type Task } from "../protocol/messages.ts";
import { StoreError } from "./errors.ts";
import { json, readJson, type Store } from "./store.ts";

/** Bytes that are written under one key to try whether there is room. */
const PIECE = 1024 * 1024;
/** Most bytes that `crypto.getRandomValues` gives at a time. */
const RANDOM = 65536;

/** How many masked tasks are remembered, so that none of them is masked again. */
const MOST_MASKED = 100;

/** What a task's training leaves, to be saved together. */
export interface FinishedUpdate {
  /** The report; the task, where its update is not masked yet. */
  readonly result: Report | Task;
  /** The bytes of each of the report's parts; of a task, its clipped update as float32. */
  readonly contents: readonly Uint8Array[];
  /** The update's weight as a share of the largest one, where it is not masked yet. */
  readonly share?: number;
  /** SHA-256 of the bundle's manifest. */
  readonly bundle: string;
  /** For the device's next task of this bundle; empty where it keeps nothing. */
  readonly keptState: Float32Array;
  /** Vectors by name, for a later task that goes on from this one. */
  readonly tied: Readonly<Record<string, Float32Array>>;
  /** The personal model for the device's next task of this bundle. */
  readonly personal: Float32Array | null;
}

export class Outbox {
  readonly #store: Store;

  constructor(store: Store) {
    this.#store = store;
  }

  /** Make an update durable, and with it what the device keeps: everything, or nothing. Rejects with StoreError. */
  async save({ result, contents, share = 1, bundle, keptState, tied, personal }: FinishedUpdate): Promise<void> {
    const parts = joined(contents);
    const changes: Record<string, Uint8Array | null> = await this.#pending(result, parts);
    if (result.type === "task") changes["pending/share"] = json({ share, crc32: crc32(parts) });
    if (keptState.length > 0) changes[`kept/${bundle}`] = bytesOf(keptState);
    if (personal !== null) changes[`personal/${bundle}`] = bytesOf(personal);
    for (const [name, vector] of Object.entries(tied))
      changes[`tied/${bundle}/${result.task}/${name}`] = bytesOf(vector);
    await this.#store.write(changes);
  }

  /** Put the masked update and its report in the place of the unmasked update: both, or nothing. Rejects with StoreError. */
  async saveMasked(report: Report, content: Uint8Array): Promise<void> {
    await this.#store.write(await this.#pending(report, content));
  }

  /** Return this task's clipped update, which is to be masked, and its weight's share; null where it was dropped, or is
   * lost. */
  async unmasked(task: string): Promise<{ update: Float32Array; share: number } | null> {
    const report = (await readJson(this.#store, "pending/report")) as { task?: string } | undefined;
    const content = await this.#store.read("pending/parts");
    const kept = (await readJson(this.#store, "pending/share")) as { share: number } | undefined;
    if (report?.task !== task || content === undefined || kept === undefined) return null;
    return { update: new Float32Array(content.slice().buffer), share: kept.share };
  }

  /** Return whether an update of this task was masked before, as far as is remembered. */
  async wasMasked(task: string): Promise<boolean> {
    return (await this.#maskedTasks()).includes(task);
  }

  async #maskedTasks(): Promise<readonly string[]> {
    return ((await readJson(this.#store, "masked")) ?? []) as string[];
  }

  async #pending(result: Report | Task, content: Uint8Array): Promise<Record<string, Uint8Array | null>> {
    const changes = { "pending/report": json(result), "pending/parts": content, "pending/share": null };
    if (result.type !== "report" || result.sealed === null) return changes;
    const tasks = [...(await this.#maskedTasks()).slice(1 - MOST_MASKED), result.task];
    return { ...changes, masked: json(tasks) };
  }

  /**
   * Reject with StoreError (full) where there is no room for these bytes, before they cost hours of training. They are
   * written, and deleted again: what a browser says of its room (`navigator.storage.estimate`) may be any figure.
   */
  async tryRoom(bytes: number): Promise<void> {
    const piece = noise(Math.min(bytes, PIECE));
    const room: Record<string, Uint8Array> = {};
    for (let begin = 0; begin < bytes; begin += PIECE) room[`pending/room/${begin}`] = piece.subarray(0, bytes - begin);
    try {
      // Without durability: this only asks whether there is room.
      await this.#store.write(room, false);
    } catch (error) {
      if (!(error instanceof StoreError) || error.reason !== "full") throw error;
      throw new StoreError(
        `there is no room for the update of this task, up to ${bytes} bytes: ${error.message}`,
        "full",
      );
    }
    await this.#dropRoom();
  }

  async #dropRoom(): Promise<void> {
    const keys = await this.#store.keys("pending/room/");
    if (keys.length > 0) await this.#store.write(Object.fromEntries(keys.map((key) => [key, null])), false);
  }

  /** Return the report of the update that an earlier process left; its task, where it is not masked yet. Deletes the
   * update where it is damaged. */
  async load(): Promise<Report | Task | null> {
    const content = await this.#store.read("pending/report");
    await this.#dropRoom();
    if (content === undefined) return null;
    try {
      const frame = new TextDecoder().decode(content);
      const result = JSON.parse(frame).type === "task" ? readFromCoordinator(frame) : readFromDevice(frame);
      if (result.type === "report" && (await this.#isIntact(result))) return result;
      if (result.type === "task" && (await this.#isUnmasked())) return result;
    } catch {
      // neither a report nor a task
    }
    await this.discard();
    return null;
  }

  /** Delete the update, whatever task it is of. */
  async discard(): Promise<void> {
    await this.#store.write({ "pending/report": null, "pending/parts": null, "pending/share": null });
  }

  /** Delete the update if it is this task's. */
  async drop(task: string): Promise<void> {
    const stored = (await readJson(this.#store, "pending/report")) as { task?: string } | undefined;
    if (stored?.task === task) await this.discard();
  }

  /** Return the update's frames from `offset` on, each with whole blocks of one part. Rejects with StoreError. */
  async chunks(
    report: Report,
    transfer: number,
    offset: number,
    chunkBytes: number,
  ): Promise<Iterable<Uint8Array<ArrayBuffer>>> {
    const content = await this.#store.read("pending/parts");
    if (content === undefined) throw new StoreError("the store has lost the finished update");
    return chunksOf(report, content, transfer, offset, chunkBytes);
  }

  async #isIntact(report: Report): Promise<boolean> {
    const content = (await this.#store.read("pending/parts")) ?? new Uint8Array(0);
    let begin = 0;
    return report.parts.every((part) => {
      const bytes = content.subarray(begin, begin + part.size);
      begin += part.size;
      return bytes.length === part.size && crc32(bytes) === part.crc32;
    });
  }

  async #isUnmasked(): Promise<boolean> {
    const content = await this.#store.read("pending/parts");
    const kept = (await readJson(this.#store, "pending/share")) as { crc32: number } | undefined;
    return content !== undefined && kept !== undefined && crc32(content) === kept.crc32;
  }

  /** Return the kept state that the last task of a bundle left; null before the first task. */
  async keptState(bundle: string, size: number): Promise<Float32Array | null> {
    return size === 0 ? null : vectorOf(await this.#store.read(`kept/${bundle}`), size);
  }

  /** Return the personal model that the last task of a bundle left, and behind its `size` elements what else the
   * algorithm keeps; null before the first task. */
  async personal(bundle: string, size: number): Promise<Float32Array | null> {
    const content = size === 0 ? undefined : await this.#store.read(`personal/${bundle}`);
    const whole = content !== undefined && content.length >= 4 * size && content.length % 4 === 0;
    return whole ? vectorOf(content, content.length / 4) : null;
  }

  /** Return the tied vectors that this task made, by name. Deletes the bundle's other sets. */
  async beginTied(bundle: string, task: string | null, size: number): Promise<Record<string, Float32Array>> {
    const vectors: Record<string, Float32Array> = {};
    const useless: Record<string, null> = {};
    for (const key of await this.#store.keys(`tied/${bundle}/`)) {
      const [, , owner, name] = key.split("/") as [string, string, string, string];
      const vector = owner === task ? vectorOf(await this.#store.read(key), size) : null;
      if (vector === null) useless[key] = null;
      else vectors[name] = vector;
    }
    if (Object.keys(useless).length > 0) await this.#store.write(useless);
    return vectors;
  }

  /** Return how often the training of this task was begun by processes that died during it. */
  async starts(task: string): Promise<number> {
    const stored = (await readJson(this.#store, "training")) as { task?: string; starts?: number } | undefined;
    return stored?.task === task ? (stored.starts ?? 0) : 0;
  }

  /** Count a start of this task's training durably, before it begins. null: it ended, well or not. */
  async setStarts(task: string | null, starts = 0): Promise<void> {
    await this.#store.write({ training: task === null ? null : json({ task, starts }) }, task !== null);
  }
}

/** Return bytes that a database cannot compress. */
function noise(bytes: number): Uint8Array {
  // getRandomValues gives 65,536 bytes at most.
  const made = new Uint8Array(bytes);
  for (let begin = 0; begin < bytes; begin += RANDOM) crypto.getRandomValues(made.subarray(begin, begin + RANDOM));
  return made;
}

function* chunksOf(
  report: Report,
  content: Uint8Array,
  transfer: number,
  offset: number,
  chunkBytes: number,
): Generator<Uint8Array<ArrayBuffer>> {
  let end = 0;
  let begin = offset;
  for (const part of report.parts) {
    end += part.size;
    const block = findEncoding(part.encoding).blockBytes;
    const most = Math.max(1, Math.floor(chunkBytes / block)) * block;
    while (begin < end) {
      const payload = content.subarray(begin, Math.min(begin + most, end));
      yield packChunk(transfer, begin, payload);
      begin += payload.length;
    }
  }
}

export function bytesOf(vector: Float32Array): Uint8Array {
  return new Uint8Array(vector.buffer, vector.byteOffset, vector.byteLength);
}

function vectorOf(content: Uint8Array | undefined, size: number): Float32Array | null {
  return content?.length === 4 * size ? new Float32Array(content.slice().buffer) : null;
}
