/** Reads what `numpy.savez` writes: a zip of stored .npy files. */

import { readFileSync } from "node:fs";
import type { Column, Numbers } from "../../src/runtimes/columns.ts";

const KINDS: Record<string, new (buffer: ArrayBuffer) => Numbers> = {
  "<f4": Float32Array,
  "<f8": Float64Array,
  "<i8": BigInt64Array,
  "<i4": Int32Array,
  "|u1": Uint8Array,
};

export function readNpz(path: string): Record<string, Column> {
  const content = readFileSync(path);
  const columns: Record<string, Column> = {};
  const end = content.lastIndexOf("PK\x05\x06", undefined, "latin1");
  let place = content.readUInt32LE(end + 16);
  for (let left = content.readUInt16LE(end + 10); left > 0; left--) {
    const size = content.readUInt32LE(place + 20);
    const nameLength = content.readUInt16LE(place + 28);
    const name = content.toString("utf8", place + 46, place + 46 + nameLength);
    const local = content.readUInt32LE(place + 42);
    const begin = local + 30 + content.readUInt16LE(local + 26) + content.readUInt16LE(local + 28);
    columns[name.replace(/\.npy$/, "")] = readNpy(content.subarray(begin, begin + size));
    place += 46 + nameLength + content.readUInt16LE(place + 30) + content.readUInt16LE(place + 32);
  }
  return columns;
}

function readNpy(content: Buffer): Column {
  const begin = 10 + content.readUInt16LE(8);
  const header = content.toString("latin1", 10, begin);
  const shape = /'shape': \(([^)]*)\)/
    .exec(header)![1]!
    .split(",")
    .filter((axis) => axis.trim() !== "");
  const Kind = KINDS[/'descr': '([^']*)'/.exec(header)![1]!]!;
  return { values: new Kind(new Uint8Array(content.subarray(begin)).buffer), shape: shape.map(Number) };
}
