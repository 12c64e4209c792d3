/** What the coordinator is told of an error that ended a training. */

import { describe, expect, test } from "vitest";
import { ProtocolError } from "../../src/protocol/errors.ts";
import { DataError, inOneLine } from "../../src/training/errors.ts";

describe("an error in one line", () => {
  test("of the user's code has its type, its file and its line", () => {
    const load = (rows: number[][]): number => rows[3]![0]!;
    let thrown: unknown;
    try {
      load([]);
    } catch (error) {
      thrown = error;
    }
    expect(inOneLine(thrown)).toMatch(
      /^TypeError: Cannot read properties of undefined .* \(in errors\.test\.ts line \d+\)$/,
    );
  });

  test("is read from what each browser writes", () => {
    const error = new RangeError("one\ntwo: 3:4");
    error.stack = "load@https://host.example/data/mydata.js?v=2:12:5\ntrain@https://host.example/sdk.js:1:2";
    expect(inOneLine(error)).toBe("RangeError: one two: 3:4 (in mydata.js line 12)");
    error.stack = "RangeError: one\ntwo: 3:4\n    at load (file:///C:/data/mydata.mjs:7:9)\n    at train (sdk.js:1:2)";
    expect(inOneLine(error)).toBe("RangeError: one two: 3:4 (in mydata.mjs line 7)");
    error.stack = "";
    expect(inOneLine(error)).toBe("RangeError: one two: 3:4");
  });

  test("of ours is its text alone", () => {
    expect(inOneLine(new DataError("x has 3 rows"))).toBe("x has 3 rows");
    expect(inOneLine(new ProtocolError("bad-message", "no JSON"))).not.toContain("line");
  });

  test("is what was thrown where that is no error", () => {
    expect(inOneLine("no camera")).toBe("no camera");
  });
});
