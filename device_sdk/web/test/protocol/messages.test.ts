import { describe, expect, test } from "vitest";
import { contentOf, EXCHANGE_KINDS } from "../../src/protocol/exchanges.ts";
import { encode, type FromDevice, readFromCoordinator, readFromDevice } from "../../src/protocol/messages.ts";
import { type Case, codeOf, content, vectors } from "../support/vectors.ts";

const { valid, invalid, contents } = vectors("messages.json");
const READ: Record<string, (text: string) => unknown> = {
  "from-coordinator": readFromCoordinator,
  "from-device": readFromDevice,
};
test("valid messages are read, their defaults filled in and unknown fields left out", () => {
  for (const one of valid as Case[]) {
    const read = READ[one.direction]!(one.text!);
    expect(read, one.name).toEqual(one.fields ?? JSON.parse(one.text!));
    if (one.direction === "from-device") expect(JSON.parse(encode(read as FromDevice)), one.name).toEqual(read);
  }
});

describe("invalid messages are refused with their code", () => {
  test("from the coordinator", async () => {
    const cases = (invalid as Case[]).filter((one) => one.direction === "from-coordinator");
    for (const one of cases) {
      const text = new TextDecoder("utf-8", { ignoreBOM: true }).decode(content(one));
      expect(await codeOf(() => readFromCoordinator(text)), one.name).toBe(one.code);
    }
    expect(cases.length).toBeGreaterThan(500);
  });

  test("from a device, where a browser's JSON can tell", async () => {
    const taken: string[] = [];
    for (const one of (invalid as Case[]).filter((given) => given.direction === "from-device")) {
      let text: string;
      try {
        text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(content(one));
      } catch {
        continue; // the WebSocket refuses such a frame
      }
      const code = await codeOf(() => readFromDevice(text));
      if (code === "nothing was thrown") taken.push(one.name);
      else expect(code, one.name).toBe(one.code);
    }
    // What JSON.parse decides before this SDK sees it.
    expect(taken.sort()).toEqual(["30,000 levels", "a lone surrogate", "an integer with a fraction of 0"]);
  });
});

test("what the coordinator would refuse is not sent", async () => {
  const heartbeat = { type: "heartbeat", task: null, steps: Number.NaN, fetched: 0 } as const;
  expect(await codeOf(() => encode(heartbeat))).toBe("bad-message");
  expect(await codeOf(() => encode({ type: "failed", task: "t", code: "killed", text: "é".repeat(1001) }))).toBe(
    "bad-message",
  );
});

test("a name that JavaScript knows otherwise is a name like any other", () => {
  const read = readFromCoordinator(
    '{"type":"task","task":"t","round":1,"bundle":"' +
      `${"a".repeat(64)}","vectors":[{"name":"model","sha256":"${"b".repeat(64)}","size":4,"encoding":"float32"}],` +
      '"parts":{"update":"float32"},"hyper":{"__proto__":2},"epochs":1,"batch_size":0,"seed":0,"deadline":1}',
  );
  expect(read.type === "task" && Object.entries(read.hyper)).toEqual([["__proto__", 2]]);
});

test("contents of exchanges are read as their kind says", async () => {
  type Content = {
    kind: string;
    of: "question" | "reply";
    name: string;
    content: Record<string, unknown>;
    good: boolean;
  };
  // Pairwise masks are not known here: such a device is never asked for them.
  const known = (contents as unknown as Content[]).filter((each) => each.kind in EXCHANGE_KINDS);
  for (const { kind, of, name, content, good } of known) {
    const message = { type: of, task: "t", kind, content } as Parameters<typeof contentOf>[0];
    const code = await codeOf(() => contentOf(message));
    expect(code, `${kind} ${of} ${name}`).toBe(good ? "nothing was thrown" : "bad-message");
  }
  expect(known.length).toBeGreaterThan(20);
});
