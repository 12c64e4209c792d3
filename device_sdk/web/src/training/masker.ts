/** Masks the updates of tasks with secure aggregation, with the device's own key. */

import { crc32 } from "../protocol/crc32.ts";
import { fromHex } from "../protocol/hex.ts";
import type { Report, Task } from "../protocol/messages.ts";
import { maskedEncoding } from "../protocol/word_sizes.ts";
import { aboutUpdate } from "../secure/about.ts";
import { type MaskedTask, termsOf, updateOf } from "../secure/task_terms.ts";
import { deviceKey } from "../storage/device_key.ts";
import type { Store } from "../storage/store.ts";
import { TrainingError } from "./errors.ts";

/** Why an update of a part of the training is not masked. The time that a device has is not among what all devices of a sum
 * sign: a coordinator that leaves all others the time for one step would have a sum that is nearly one device's update. */
export const CUT_SHORT =
  "the training was cut short, and such an update is not masked: where others have learned less, a sum tells more of one device";

export class Masker {
  readonly #store: Store;
  readonly #device: string;

  /** store: has the device's own key, or will. device: its name. */
  constructor(store: Store, device: string) {
    this.#store = store;
    this.#device = device;
  }

  /** Fetch what masks, and make the device's own key, before a training that needs them. Rejects with TrainingError, where
   * nothing can be sealed for the task's helper, with StoreError, and with Error where the code cannot be fetched. */
  async prepare(task: MaskedTask): Promise<void> {
    const { isKey } = await import("../secure/masking.ts");
    if (!isKey(fromHex(task.secure.helper))) {
      const text =
        `the task's helper has the key ${task.secure.helper}, which is of small order: anybody could open what is sealed ` +
        "for it";
      throw new TrainingError("unsupported", text);
    }
    await deviceKey(this.#store);
  }

  /**
   * Return the masked words of a clipped update, as they travel, and the report of them, which says nothing that was
   * measured. Called once for a task whose words are sent: two masks of one update would tell of it.
   *
   * share: the update's weight as a share of the largest one. factor: what its staleness leaves of it.
   */
  async mask(
    task: MaskedTask,
    update: Float32Array,
    share: number,
    factor: number,
  ): Promise<{ report: Report; content: Uint8Array }> {
    const { maskUpdate } = await import("../secure/masking.ts");
    const key = await deviceKey(this.#store);
    const about = aboutUpdate(termsOf(task, update.length + 1), updateOf(task, this.#device));
    const counted = { share, factor, bound: task.clip, bits: task.secure.bits };
    const helper = fromHex(task.secure.helper);
    const { content, sealed, signature } = await maskUpdate(update, counted, about, helper, key.sign);
    const encoding = maskedEncoding(task.secure.bits);
    const part = { name: "update", encoding, size: content.length, crc32: crc32(content) };
    return { report: { ...withheld(task), parts: [part], sealed, signature }, content };
  }
}

/** Return a report that says nothing of what the device measured: neither how many examples it has nor how it trained. */
function withheld(task: Task): Report {
  return {
    type: "report",
    task: task.task,
    round: task.round,
    parts: [],
    examples: 1,
    steps: 1,
    epochs: task.epochs,
    complete: true,
    loss: 0,
    metrics: {},
    seconds: 0,
    evaluation: null,
    personal: null,
    lost_tied: false,
    clipped: null,
    sealed: null,
    signature: null,
  };
}
