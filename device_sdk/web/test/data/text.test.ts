import { expect, test } from "vitest";
import { type TextOptions, textTokens } from "../../src/data/text.ts";

function tokens(text: string, options: Partial<TextOptions>): number[] {
  const [example] = [...textTokens([text], { length: 4, tokens: "bytes", ...options })];
  return [...(example!.x as Int32Array)];
}

test("bytes of UTF-8, cut or filled up", () => {
  expect(tokens("hé", {})).toEqual([104, 195, 169, 0]);
  expect(tokens("hello", {})).toEqual([104, 101, 108, 108]);
  expect(tokens("h", { padding: -1 })).toEqual([104, -1, -1, -1]);
});

test("words and signs of a vocabulary", () => {
  const vocabulary = ["<pad>", "<unk>", "good", "morning", "!", "3"];
  expect(tokens("good morning !", { tokens: vocabulary })).toEqual([2, 3, 4, 0]);
  expect(tokens("morning!3", { tokens: vocabulary })).toEqual([3, 4, 5, 0]);
  expect(tokens("bad morning", { tokens: vocabulary, unknown: 1 })).toEqual([1, 3, 0, 0]);
  const words = "text 0 (the first is 0) has the word bad, which the vocabulary does not; unknown: the number";
  expect(() => tokens("bad morning", { tokens: vocabulary })).toThrow(words);
});

test("a tokenizer of one's own", () => {
  expect(tokens("a b c", { tokens: (text) => text.split(" ").map((word) => word.charCodeAt(0)) })).toEqual([
    97, 98, 99, 0,
  ]);
  const halves = (): number[] => [0.5];
  expect(() => tokens("a", { tokens: halves })).toThrow("has the token 0.5; expected integers of 32 bits");
});

test("a mask and labels", () => {
  const texts = [{ text: "ab", label: "spam" }];
  const options = { length: 3, tokens: "bytes", classes: ["ham", "spam"] } as const;
  expect([...textTokens(texts, { ...options, names: { input: "ids", mask: "mask", label: "class" } })]).toEqual([
    { ids: Int32Array.of(97, 98, 0), mask: Uint8Array.of(1, 1, 0), class: 1 },
  ]);
});

test("a text without tokens, and a length that is none, are refused", () => {
  expect(() => tokens("", {})).toThrow("text 0 (the first is 0) has no tokens; expected at least one");
  expect(() => tokens("a", { length: 0 })).toThrow("length is 0; expected 1 or more tokens");
});
