/** Text as numbers of a fixed length. */

import { DataError } from "../training/errors.ts";
import type { Example } from "./examples.ts";
import { classOf, type Label, type Names } from "./labels.ts";

export interface TextOptions {
  /** Tokens of an example: longer texts are cut, shorter ones are filled up with `padding`. */
  readonly length: number;
  /** `bytes` (of UTF-8, 0 to 255), a vocabulary (words and signs, whose places are their numbers), or a tokenizer. */
  readonly tokens: "bytes" | readonly string[] | ((text: string) => Iterable<number>);
  /** The number behind a text's end. Default: 0. */
  readonly padding?: number;
  /** The number of words that the vocabulary does not have. Left out: such a word is an error. */
  readonly unknown?: number;
  /** `mask`: the array that is 1 where a token is, 0 where padding is. Left out: there is none. */
  readonly names?: Names & { readonly mask?: string };
  /** The classes' names in the model's order, where labels are names. */
  readonly classes?: readonly string[];
}

export type Text = string | { readonly text: string; readonly label: Label };

/** Words and numbers, and each other sign by itself. */
const WORDS = /[\p{L}\p{M}\p{N}]+|[^\s\p{L}\p{M}\p{N}]/gu;

/** Yield an example for each text: int32 of the shape (length,), the mask and the label where they are wanted. Throws
 * DataError: a text without tokens, a word that is not known. */
export function* textTokens(texts: Iterable<Text>, options: TextOptions): Generator<Example> {
  const { length, padding = 0, names: { input = "x", label: labelName = "y", mask: maskName } = {} } = options;
  if (!Number.isInteger(length) || length < 1) throw new DataError(`length is ${length}; expected 1 or more tokens`);
  const tokenize = tokenizer(options);
  let number = 0;
  for (const item of texts) {
    const { text, label } = typeof item === "string" ? { text: item, label: undefined } : item;
    const what = `text ${number} (the first is 0)`;
    const numbers = [...tokenize(text, what)].slice(0, length);
    if (numbers.length === 0) throw new DataError(`${what} has no tokens; expected at least one`);
    const wrong = numbers.find((token) => token !== (token | 0));
    if (wrong !== undefined) throw new DataError(`${what} has the token ${wrong}; expected integers of 32 bits`);
    const values = new Int32Array(length).fill(padding);
    values.set(numbers);
    yield {
      [input]: values,
      ...(maskName !== undefined && { [maskName]: new Uint8Array(length).fill(1, 0, numbers.length) }),
      ...(label !== undefined && { [labelName]: classOf(label, options.classes, what) }),
    };
    number += 1;
  }
}

function tokenizer({ tokens, unknown }: TextOptions): (text: string, what: string) => Iterable<number> {
  if (typeof tokens === "function") return tokens;
  if (tokens === "bytes") return (text) => new TextEncoder().encode(text);
  const places = new Map(tokens.map((word, place) => [word, place]));
  return (text, what) =>
    (text.match(WORDS) ?? []).map((word) => {
      const index = places.get(word) ?? unknown;
      if (index !== undefined) return index;
      throw new DataError(
        `${what} has the word ${word}, which the vocabulary does not; unknown: the number of such words`,
      );
    });
}
