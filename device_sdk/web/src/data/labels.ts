/** Classes as numbers: a label is a number, or a name among the classes. */

import { DataError } from "../training/errors.ts";

export type Label = number | string;

/** The names of an example's arrays in the bundle's manifest. */
export interface Names {
  /** What the model reads. Default: `x`. */
  readonly input?: string;
  /** What it is to say. Default: `y`. */
  readonly label?: string;
}

/** Return the label as a number. Throws DataError; `what`: what has the label, for people. */
export function classOf(label: Label, classes: readonly string[] | undefined, what: string): number {
  if (typeof label === "number") return label;
  if (classes === undefined) {
    if (/^\d+$/.test(label)) return Number(label);
    throw new DataError(
      `${what} has the label ${label}; expected a number, or classes: the names in the model's order`,
    );
  }
  const index = classes.indexOf(label);
  if (index < 0) throw new DataError(`${what} has the label ${label}; expected one of ${classes.join(", ")}`);
  return index;
}
