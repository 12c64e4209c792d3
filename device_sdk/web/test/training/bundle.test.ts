/** Bundles that this SDK does not train. */

import { expect, test } from "vitest";
import { readManifest } from "../../src/protocol/manifest.ts";
import type { Engine } from "../../src/runtimes/engine.ts";
import { openFiles } from "../../src/training/bundle.ts";
import { vectors } from "../support/vectors.ts";

test("a bundle with preprocessing is refused before anything of it is read", async () => {
  const { valid, accepted } = vectors("manifest.json");
  for (const { change } of accepted) {
    const fields = { ...JSON.parse(valid.text), ...change };
    const manifest = readManifest(new TextEncoder().encode(JSON.stringify(fields)));
    const read = (): Promise<Uint8Array> => Promise.reject(new Error("it was read"));
    await expect(openFiles("0".repeat(64), manifest, read, {} as Engine)).rejects.toThrow(
      /says how its arrays are made of raw data \(preprocessing\), which this SDK does not do/,
    );
  }
});
