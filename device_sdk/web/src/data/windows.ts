/** Windows of a signal: samples that come when they come, brought to a fixed rate and cut into pieces that may overlap. */

import { DataError } from "../training/errors.ts";
import type { Tensor } from "./examples.ts";

export interface WindowShape {
  /** Samples of a window. */
  readonly length: number;
  /** Samples that a window shares with the one before. Default: 0. */
  readonly overlap?: number;
  /** Samples in a second. Default: 50. */
  readonly rate?: number;
  /** The longest time without a sample, in seconds; after a longer one a new window begins. Default: 0.2. */
  readonly gap?: number;
}

/** Makes windows of samples. Between two samples values are interpolated linearly. */
export class Windows {
  /** How often the signal was gone for longer than `gap`. */
  gaps = 0;
  readonly #channels: number;
  readonly #shape: Required<WindowShape>;
  #before: { time: number; values: readonly number[] } | null = null;
  /** The time of the window's first sample, and how many were made since. */
  #begin = 0;
  #made = 0;
  /** The last samples, at most a window's. */
  #samples: (readonly number[])[] = [];

  /** channels: numbers of a sample. Throws DataError where no windows can be made so. */
  constructor(channels: number, { length, overlap = 0, rate = 50, gap = 0.2 }: WindowShape) {
    if (!Number.isInteger(length) || length < 1) throw new DataError(`length is ${length}; expected 1 or more samples`);
    if (!Number.isInteger(overlap) || overlap < 0 || overlap >= length) {
      throw new DataError(`overlap is ${overlap} samples; expected 0 to ${length - 1}, fewer than a window has`);
    }
    if (!(rate > 0 && gap > 1 / rate)) {
      throw new DataError(
        `rate is ${rate} and gap ${gap}; expected samples in a second, and more seconds than 1 / rate`,
      );
    }
    this.#channels = channels;
    this.#shape = { length, overlap, rate, gap };
  }

  /** Take the sample of this time, in seconds. Returns the windows that end with it, each of shape (channels, length). */
  push(time: number, values: readonly number[]): Tensor[] {
    const { gap, rate } = this.#shape;
    const before = this.#before;
    if (before !== null && time <= before.time) return []; // the same event again, or a clock that went back
    this.#before = { time, values };
    if (before === null || time - before.time > gap) {
      if (before !== null) this.gaps += 1;
      this.#begin = time;
      this.#made = 0;
      this.#samples = [];
    }
    const windows: Tensor[] = [];
    // Times are counted from the first sample, so that no error adds up. A billionth of a step is no step.
    const next = (): number => this.#begin + this.#made / rate;
    for (let at = next(); at <= time + 1e-9 / rate; at = next()) {
      this.#made += 1;
      const part = before === null || at >= time ? 1 : (at - before.time) / (time - before.time);
      const between = (value: number, place: number): number => before!.values[place]! * (1 - part) + value * part;
      const window = this.#add(part === 1 ? values : values.map(between));
      if (window !== null) windows.push(window);
    }
    return windows;
  }

  #add(sample: readonly number[]): Tensor | null {
    const { length, overlap } = this.#shape;
    this.#samples.push(sample);
    if (this.#samples.length < length) return null;
    const values = new Float32Array(this.#channels * length);
    this.#samples.forEach((one, at) => {
      for (let channel = 0; channel < this.#channels; channel++) values[channel * length + at] = one[channel]!;
    });
    this.#samples = this.#samples.slice(length - overlap);
    return { values, shape: [this.#channels, length] };
  }
}
