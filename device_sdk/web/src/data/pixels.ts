/** From pixels to what a model takes: which part of a picture is taken, and its colours as numbers. */

import { DataError } from "../training/errors.ts";
import type { Tensor } from "./examples.ts";

export interface ImageShape {
  /** Pixels of what the model takes. */
  readonly width: number;
  readonly height: number;
  /** 1: grey (ITU-R BT.601: 0.299 red + 0.587 green + 0.114 blue). 3: red, green, blue. Default: 3. */
  readonly channels?: 1 | 3;
  /** `crop` (default): the middle, as much as has the right shape. `pad`: the whole, with black beside it. `stretch`. */
  readonly fit?: "crop" | "pad" | "stretch";
  /** Subtracted from colours of 0 to 1: for all channels, or for each. Default: 0. */
  readonly mean?: number | readonly number[];
  /** What they are divided by then. Default: 1. */
  readonly std?: number | readonly number[];
}

/** A rectangle in pixels: left, top, width, height. */
export type Box = readonly [x: number, y: number, width: number, height: number];

/** Return the image's shape with its defaults. Throws DataError where it cannot be one. */
export function checkedShape({ channels = 3, fit = "crop", ...shape }: ImageShape): Required<ImageShape> {
  const { width, height } = shape;
  for (const side of [width, height]) {
    if (!Number.isInteger(side) || side < 1)
      throw new DataError(`an image of ${width} x ${height} pixels cannot be made`);
  }
  const each = (given: number | readonly number[], what: string): readonly number[] => {
    const list = typeof given === "number" ? Array<number>(channels).fill(given) : given;
    if (list.length === channels && list.every((value) => Number.isFinite(value) && (what === "mean" || value > 0))) {
      return list;
    }
    const one = what === "mean" ? "a number" : "a number above 0";
    throw new DataError(`${what} is ${JSON.stringify(given)}; expected ${one}, or ${channels} of them`);
  };
  return { width, height, channels, fit, mean: each(shape.mean ?? 0, "mean"), std: each(shape.std ?? 1, "std") };
}

/** Return which part of a picture is drawn (`from`), and where (`to`). */
export function placement(width: number, height: number, shape: Required<ImageShape>): { from: Box; to: Box } {
  const whole: Box = [0, 0, shape.width, shape.height];
  if (shape.fit === "stretch") return { from: [0, 0, width, height], to: whole };
  const scales = [shape.width / width, shape.height / height] as const;
  if (shape.fit === "crop") {
    const scale = Math.max(...scales);
    return { from: middle(width, height, shape.width / scale, shape.height / scale), to: whole };
  }
  const scale = Math.min(...scales);
  return { from: [0, 0, width, height], to: middle(shape.width, shape.height, width * scale, height * scale) };
}

function middle(width: number, height: number, insideWidth: number, insideHeight: number): Box {
  return [(width - insideWidth) / 2, (height - insideHeight) / 2, insideWidth, insideHeight];
}

/** Return a canvas's pixels (red, green, blue, alpha; 0 to 255; row by row) as float32 of the shape (channels, height,
 * width). */
export function tensorOf(pixels: Uint8ClampedArray, shape: Required<ImageShape>): Tensor {
  const { width, height, channels } = shape;
  const [mean, std] = [shape.mean as readonly number[], shape.std as readonly number[]];
  const size = width * height;
  const values = new Float32Array(channels * size);
  for (let pixel = 0; pixel < size; pixel++) {
    const [red, green, blue] = [pixels[4 * pixel]!, pixels[4 * pixel + 1]!, pixels[4 * pixel + 2]!];
    const colours = channels === 1 ? [0.299 * red + 0.587 * green + 0.114 * blue] : [red, green, blue];
    for (let channel = 0; channel < channels; channel++) {
      values[channel * size + pixel] = (colours[channel]! / 255 - mean[channel]!) / std[channel]!;
    }
  }
  return { values, shape: [channels, height, width] };
}
