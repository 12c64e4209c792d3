/** Images from files that a person chose. */

import { DataError } from "../training/errors.ts";
import type { Example, Tensor } from "./examples.ts";
import { classOf, type Label, type Names } from "./labels.ts";
import { checkedShape, type ImageShape, placement, tensorOf } from "./pixels.ts";

export interface ImageOptions extends ImageShape {
  readonly names?: Names;
  /**
   * Where a file's label comes from: its `folder` (of an `<input webkitdirectory>`), its `name` up to the first `-`, `_`
   * or `.` (`cat_17.jpg`), or a function. Left out: examples have no label.
   */
  readonly label?: "folder" | "name" | ((file: File, number: number) => Label | Promise<Label>);
  /** The classes' names in the model's order, where labels are names. */
  readonly classes?: readonly string[];
}

/**
 * Yield an example for each file: float32 of the shape (channels, height, width), and its label. One image is decoded at a
 * time, turned as its camera was held. Throws DataError: a file that is no image, or has no label.
 */
export async function* imagesFromFiles(files: Iterable<File>, options: ImageOptions): AsyncGenerator<Example> {
  const shape = checkedShape(options);
  const { input = "x", label: labelName = "y" } = options.names ?? {};
  const draw = drawer(shape);
  let number = 0;
  for (const file of files) {
    let bitmap: ImageBitmap;
    try {
      bitmap = await createImageBitmap(file);
    } catch (error) {
      throw new DataError(`${file.name} is no image that this browser can read (${(error as Error).message})`);
    }
    const image = draw(bitmap, bitmap.width, bitmap.height);
    bitmap.close();
    const label = options.label === undefined ? undefined : await labelOf(file, number, options.label);
    yield {
      [input]: image,
      ...(label !== undefined && { [labelName]: classOf(label, options.classes, file.name) }),
    };
    number += 1;
  }
}

/** Return the label of a file. Throws DataError where its name or folder has none. */
export async function labelOf(file: File, number: number, from: NonNullable<ImageOptions["label"]>): Promise<Label> {
  if (typeof from === "function") return from(file, number);
  const label = from === "name" ? /^[^-_.]+/.exec(file.name)?.[0] : file.webkitRelativePath.split("/").at(-2);
  if (label !== undefined) return label;
  const how = from === "name" ? "a name such as cat_17.jpg" : "files of a folder that was chosen as a whole";
  throw new DataError(`${file.name} has no label in its ${from}; expected ${how}`);
}

/** Return what draws pictures at the wanted size, and reads them. */
export function drawer(
  shape: Required<ImageShape>,
): (image: CanvasImageSource, width: number, height: number) => Tensor {
  const canvas = new OffscreenCanvas(shape.width, shape.height);
  const context = canvas.getContext("2d", { willReadFrequently: true, alpha: false });
  if (context === null) throw new DataError("this browser draws no pictures here; there is no 2D canvas");
  context.imageSmoothingQuality = "high";
  return (image, width, height) => {
    const { from, to } = placement(width, height, shape);
    context.fillRect(0, 0, shape.width, shape.height); // black, behind what is transparent or padded
    context.drawImage(image, ...from, ...to);
    return tensorOf(context.getImageData(0, 0, shape.width, shape.height).data, shape);
  };
}
