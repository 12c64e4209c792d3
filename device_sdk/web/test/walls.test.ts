/** Imports run one way: a folder imports what is below it, and files import each other in no circle. */

import { readdirSync, readFileSync } from "node:fs";
import { dirname, join, relative } from "node:path";
import { expect, test } from "vitest";

const SOURCE = join(import.meta.dirname, "..", "src");
/** From the top down. Those of one row do not import each other. */
const LAYERS = [
  ["index.ts", "worker.ts"],
  ["remote.ts"],
  ["device.ts"],
  ["driver", "data"],
  ["training"],
  ["runtimes"],
  ["storage", "life"],
  ["session", "secure"],
  ["protocol"],
];

type Imports = ReadonlyMap<string, readonly string[]>;

function importsOfSource(): Imports {
  const files = readdirSync(SOURCE, { recursive: true, encoding: "utf8" }).filter((name) => name.endsWith(".ts"));
  return new Map(
    files.map((file) => {
      const text = readFileSync(join(SOURCE, file), "utf8");
      const found = [...text.matchAll(/(?:from|import\()\s*"(\.[^"]+)"/g)].map((match) => match[1] ?? "");
      return [file, found.map((path) => relative(SOURCE, join(SOURCE, dirname(file), path)))];
    }),
  );
}

function upward(imports: Imports): string[] {
  const folder = (file: string): string => file.split("/")[0] ?? "";
  const layer = (file: string): number => LAYERS.findIndex((row) => row.includes(folder(file)));
  return [...imports].flatMap(([file, targets]) =>
    targets
      .filter((target) => layer(target) < 0 || (folder(target) !== folder(file) && layer(target) <= layer(file)))
      .map((target) => `${file} -> ${target}`),
  );
}

/** Return what is left once files that import nothing that is left are taken away, again and again. */
function circles(imports: Imports): string[] {
  let left = [...imports.keys()];
  for (;;) {
    const next = left.filter((file) => imports.get(file)?.some((target) => left.includes(target)));
    if (next.length === left.length) return next.sort();
    left = next;
  }
}

test("the source imports downwards, in no circle", () => {
  const imports = importsOfSource();
  expect(imports.get("index.ts")).toContain("device.ts");
  expect(upward(imports)).toEqual([]);
  expect(circles(imports)).toEqual([]);
});

test("an import that goes up, and a circle, are seen", () => {
  expect(upward(new Map([["runtimes/a.ts", ["training/b.ts", "protocol/c.ts", "runtimes/d.ts"]]]))).toEqual([
    "runtimes/a.ts -> training/b.ts",
  ]);
  expect(upward(new Map([["storage/a.ts", ["life/b.ts", "elsewhere/c.ts"]]]))).toHaveLength(2);
  const imports = new Map([
    ["storage/a.ts", ["storage/b.ts"]],
    ["storage/b.ts", ["storage/a.ts", "storage/c.ts"]],
    ["storage/c.ts", []],
  ]);
  expect(circles(imports)).toEqual(["storage/a.ts", "storage/b.ts"]);
});
