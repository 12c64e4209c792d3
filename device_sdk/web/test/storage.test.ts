import "fake-indexeddb/auto";
import { IDBFactory } from "fake-indexeddb";
import { beforeEach, describe, expect, test, vi } from "vitest";
import { crc32 } from "../src/protocol/crc32.ts";
import { joined } from "../src/protocol/deltas.ts";
import type { Question, Report, Task } from "../src/protocol/messages.ts";
import { sha256 } from "../src/protocol/sha256.ts";
import type { Wanted } from "../src/session/commands.ts";
import { Contents } from "../src/storage/contents.ts";
import { StoreError } from "../src/storage/errors.ts";
import { Enrolment, readOrMakeName } from "../src/storage/identity.ts";
import { openIndexedDb } from "../src/storage/indexed_db.ts";
import { Outbox } from "../src/storage/outbox.ts";
import { MemoryStore, type Store } from "../src/storage/store.ts";
import { SECURE, SECURE_TASK } from "./support/tasks.ts";
import { hex, vectors } from "./support/vectors.ts";

/** A task whose update is not masked before its staleness is known. */
const TASK: Task = {
  ...SECURE_TASK,
  task: "t",
  round: 1,
  epochs: 1,
  secure: { ...SECURE, most_weight: 80, least_factor: 0.25 },
};

const STORES: [string, () => Promise<Store>][] = [
  ["in memory", async () => new MemoryStore()],
  [
    "in IndexedDB",
    () => {
      globalThis.indexedDB = new IDBFactory();
      return openIndexedDb();
    },
  ],
];

describe.each(STORES)("a store %s", (_, open) => {
  let store: Store;
  beforeEach(async () => {
    store = await open();
  });

  test("keeps values by key, and lists its keys in order", async () => {
    await store.write({ "b/2": hex("02"), "b/1": hex("01"), c: hex("") });
    await store.write({ c: null, "b/3": hex("0303") }, false);
    expect(await store.keys("b/")).toEqual(["b/1", "b/2", "b/3"]);
    expect(await store.read("b/3")).toEqual(hex("0303"));
    expect(await store.read("c")).toBeUndefined();
  });
  test("keeps what it was given, whatever becomes of the array", async () => {
    const given = hex("0102");
    await store.write({ a: given.subarray(1) });
    given.fill(9);
    expect(await store.read("a")).toEqual(hex("02"));
  });

  describe("contents", () => {
    const bytes = hex("0001020304050607");
    const wanted: Wanted = {
      sha256: sha256(bytes),
      name: "the model",
      place: `model/${sha256(bytes)}`,
      size: 8,
      limit: 8,
      have: 0,
    };
    const task = (manifest: string, changes: object = {}): Question => {
      const model = { name: "model", sha256: wanted.sha256, size: 8, encoding: "float32", delta: null, ...changes };
      return {
        type: "question",
        task: "e",
        kind: "evaluation",
        deadline: 1,
        phase: 1,
        content: {},
        bundle: manifest,
        vectors: [model],
      };
    };

    test("a download goes on where it stopped, and begins again at 0", async () => {
      const first = new Contents(store);
      await first.append(wanted, 0, bytes.subarray(0, 3));
      await first.append(wanted, 3, bytes.subarray(3, 5));
      const contents = new Contents(store);
      expect((await contents.lacking(task("a".repeat(64)))).map((one) => [one.name, one.have])).toEqual([
        ["manifest.json", 0],
        ["the model", 5],
      ]);
      await contents.append(wanted, 0, bytes.subarray(0, 4));
      await contents.append(wanted, 4, bytes.subarray(4));
      expect(await contents.finish(wanted)).toBe(true);
      expect(await contents.vector(wanted.sha256)).toEqual(bytes);
      expect(await contents.models()).toEqual([wanted.sha256]);
      expect((await contents.lacking(task("a".repeat(64)))).map((one) => one.name)).toEqual(["manifest.json"]);
    });
    test("wrong bytes are deleted, and so is what was damaged in the store", async () => {
      const contents = new Contents(store);
      await contents.append(wanted, 0, hex("ff01020304050607"));
      expect(await contents.finish(wanted)).toBe(false);
      expect(await store.keys("partial/")).toEqual([]);
      await store.write({ [wanted.place]: hex("ff") });
      expect((await contents.lacking(task("a".repeat(64)))).map((one) => one.name)).toContain("the model");
    });
    test("the manifest names the files, which bundles have in common; those of old bundles are deleted", async () => {
      const { text } = vectors("manifest.json").valid as { text: string };
      const contents = new Contents(store);
      const hashes: string[] = [];
      for (const name of ["softmax", "one", "two", "three"]) {
        const manifest = new TextEncoder().encode(text.replace('"softmax"', JSON.stringify(name)));
        hashes.push(sha256(manifest));
        await store.write({ [`file/${hashes.at(-1)}`]: manifest });
        const lacking = await contents.lacking(task(hashes.at(-1)!));
        expect(lacking.map((one) => one.name)).toEqual(
          expect.arrayContaining(["graphs/train.onnx", "graphs/eval.onnx", "parameters.safetensors", "the model"]),
        );
      }
      expect((await store.keys("file/")).sort()).toEqual(
        hashes
          .slice(1)
          .map((hash) => `file/${hash}`)
          .sort(),
      );
    });
    test("a device that predicts fetches the model for that too", async () => {
      const { text } = vectors("manifest.json").valid as { text: string };
      const manifest = new TextEncoder().encode(text);
      await store.write({ [`file/${sha256(manifest)}`]: manifest });
      const names = async (predicts: boolean): Promise<string[]> =>
        (await new Contents(store, predicts).lacking(task(sha256(manifest)))).map((one) => one.name);
      expect(await names(false)).not.toContain("graphs/infer.onnx");
      expect(await names(true)).toContain("graphs/infer.onnx");
    });
    test("a difference from a model that is still there gives the vector", async () => {
      const [{ base, hex: difference, vector }] = vectors("encodings.json").deltas as [Record<string, string>];
      const [from, delta, to] = [hex(base!), hex(difference!), hex(vector!)];
      await store.write({ [`model/${sha256(from)}`]: from });
      const given = { base: sha256(from), sha256: sha256(delta), size: delta.length };
      const contents = new Contents(store);
      const asked = task("a".repeat(64), { sha256: sha256(to), size: to.length, delta: given });
      const found = (await contents.lacking(asked)).at(-1)!;
      expect(found).toMatchObject({ sha256: sha256(delta), base: sha256(from), instead: { sha256: sha256(to) } });
      await contents.append(found, 0, delta);
      expect(await contents.finish(found)).toBe(true);
      expect(await contents.vector(sha256(to))).toEqual(to);
    });
  });

  describe("the outbox", () => {
    const contents = [hex("00000000"), hex("0000803f0000003f")];
    const parts = contents.map((content, place) => {
      return { name: `p${place}`, encoding: "float32", size: content.length, crc32: crc32(content) };
    });
    const report = {
      type: "report",
      task: "t",
      round: 1,
      parts,
      examples: 1,
      steps: 1,
      epochs: 1,
      complete: true,
    } as const;
    const whole: Report = {
      ...report,
      loss: 1,
      metrics: {},
      seconds: 0,
      evaluation: null,
      personal: null,
      lost_tied: false,
      clipped: null,
      sealed: null,
      signature: null,
    };
    const finished = { result: whole, contents, bundle: "b", keptState: Float32Array.of(1, 2), personal: null };

    test("an update and what is kept are there together, and outlive the process", async () => {
      await new Outbox(store).save({ ...finished, tied: { dual: Float32Array.of(3) } });
      const outbox = new Outbox(store);
      expect(await outbox.load()).toEqual(whole);
      expect(await outbox.keptState("b", 2)).toEqual(Float32Array.of(1, 2));
      expect(await outbox.keptState("b", 3)).toBeNull();
      expect(await outbox.personal("b", 2)).toBeNull();
      await outbox.drop("another");
      expect(await outbox.load()).not.toBeNull();
      await outbox.drop("t");
      expect(await outbox.load()).toBeNull();
      expect(await outbox.beginTied("b", "t", 1)).toEqual({ dual: Float32Array.of(3) });
      expect(await outbox.beginTied("b", "u", 1)).toEqual({});
      expect(await store.keys("tied/")).toEqual([]);
    });
    test("chunks hold whole blocks of one part", async () => {
      const outbox = new Outbox(store);
      await outbox.save({ ...finished, tied: {} });
      const sizes = async (offset: number, most: number): Promise<number[]> =>
        Array.from(await outbox.chunks(whole, 7, offset, most), (frame) => frame.length - 16);
      expect(await sizes(0, 100)).toEqual([4, 8]);
      expect(await sizes(4, 7)).toEqual([4, 4]);
      expect(await sizes(12, 7)).toEqual([]);
    });
    describe("without a mask", () => {
      const { task } = whole;
      const update = hex("0000803f0000003f");
      const given = { ...TASK, task };
      const unmasked = { ...finished, result: given, contents: [update], share: 0.25, tied: {} };
      const masked: Report = { ...whole, sealed: "d".repeat(160), signature: "e".repeat(128) };
      const words = joined(contents);

      test("is there with its task and its share, until the masked one takes its place", async () => {
        await new Outbox(store).save(unmasked);
        const outbox = new Outbox(store);
        expect(await outbox.load()).toEqual(given);
        expect(await outbox.unmasked(task)).toEqual({ update: Float32Array.of(1, 0.5), share: 0.25 });
        expect(await outbox.wasMasked(task)).toBe(false);
        await outbox.saveMasked(masked, words);
        expect(await new Outbox(store).load()).toEqual(masked);
        expect(await store.read("pending/parts")).toEqual(words);
        expect(await store.read("pending/share")).toBeUndefined();
        expect(await outbox.unmasked(task)).toBeNull();
      });
      test("is masked and saved in one write: no process can die between the parts of it", async () => {
        const outbox = new Outbox(store);
        await outbox.save(unmasked);
        const write = vi.spyOn(store, "write");
        await outbox.saveMasked(masked, words);
        expect(write).toHaveBeenCalledTimes(1);
        expect(Object.keys(write.mock.calls[0]![0]).sort()).toEqual([
          "masked",
          "pending/parts",
          "pending/report",
          "pending/share",
        ]);
      });
      test("of another task, or lost, is none to mask", async () => {
        const outbox = new Outbox(store);
        expect(await outbox.unmasked(task)).toBeNull();
        await outbox.save(unmasked);
        expect(await outbox.unmasked("another")).toBeNull();
      });
      test.each(["pending/parts", "pending/share"])("and damaged is dropped: %s", async (key) => {
        const outbox = new Outbox(store);
        for (const damage of [hex("ff"), null]) {
          await outbox.save(unmasked);
          await store.write({ [key]: damage });
          expect(await outbox.load()).toBeNull();
          expect(await store.keys("pending/")).toEqual([]);
        }
      });
      test("is deleted with its task", async () => {
        const outbox = new Outbox(store);
        await outbox.save(unmasked);
        await outbox.drop(task);
        expect(await store.keys("pending/")).toEqual([]);
      });
      test("a task that was masked is remembered after its update is gone; the last 100 are", async () => {
        const outbox = new Outbox(store);
        await outbox.save({ ...finished, result: masked, tied: {} }); // masked at once
        await outbox.drop(task);
        for (let number = 1; number < 100; number++) await outbox.saveMasked({ ...masked, task: `t${number}` }, words);
        expect(await new Outbox(store).wasMasked(task)).toBe(true);
        await outbox.saveMasked({ ...masked, task: "t100" }, words);
        expect(await outbox.wasMasked(task)).toBe(false);
        expect(await outbox.wasMasked("t100")).toBe(true);
        expect(await outbox.wasMasked("t1")).toBe(true);
      });
    });

    test("a damaged update is dropped", async () => {
      const outbox = new Outbox(store);
      await outbox.save({ ...finished, tied: {} });
      await store.write({ "pending/parts": hex("ff") });
      expect(await outbox.load()).toBeNull();
      expect(await store.keys("pending/")).toEqual([]);
    });
    test("room is tried before training, and given back", async () => {
      const { write } = store;
      const written: number[] = [];
      store.write = (changes, durable) => {
        written.push(Object.values(changes).reduce((sum, value) => sum + (value?.length ?? 0), 0));
        if (written.at(-1)! > 3_000_000) return Promise.reject(new StoreError("full up", "full"));
        return write.call(store, changes, durable);
      };
      await new Outbox(store).tryRoom(2_500_000);
      expect(written).toEqual([2_500_000, 0]);
      expect(await store.keys("pending/")).toEqual([]);
      await expect(new Outbox(store).tryRoom(4_000_000)).rejects.toMatchObject({
        reason: "full",
        message: "there is no room for the update of this task, up to 4000000 bytes: full up",
      });
    });
    test("what a page that died left of trying for room is deleted", async () => {
      await store.write({ "pending/room/0": hex("00") });
      expect(await new Outbox(store).load()).toBeNull();
      expect(await store.keys("pending/")).toEqual([]);
    });
    test("starts of a task's training are counted", async () => {
      const outbox = new Outbox(store);
      await outbox.setStarts("t", 2);
      expect([await outbox.starts("t"), await outbox.starts("u")]).toEqual([2, 0]);
      await outbox.setStarts(null);
      expect(await outbox.starts("t")).toBe(0);
    });
  });

  test("the manifest that was used last is known", async () => {
    const contents = new Contents(store);
    expect(await contents.lastManifest()).toBeNull();
    await store.write({ bundles: new TextEncoder().encode('["ab"]'), "file/ab": hex("010203") });
    expect(await contents.lastManifest()).toEqual({ sha256: "ab", size: 3 });
  });

  describe("the identity", () => {
    test("a name is made once", async () => {
      const name = await readOrMakeName(store);
      expect(name).toMatch(/^[A-Za-z0-9][A-Za-z0-9_-]{21}$/);
      expect(await readOrMakeName(store)).toBe(name);
      await expect(readOrMakeName(store, "another")).rejects.toThrow("not another");
      await expect(readOrMakeName(new MemoryStore(), "no name")).rejects.toThrow("a device's name");
    });
    test("a name that is damaged is made again", async () => {
      await store.write({ identity: hex("ff") });
      const name = await readOrMakeName(store);
      expect(await readOrMakeName(store)).toBe(name);
    });
    test("a credential is made where a token is given, durable before it is shown, and changed", async () => {
      expect(await new Enrolment(store, "d").subprotocols()).toEqual([]);
      const token = "t".repeat(43);
      const enrolment = new Enrolment(store, "d", token);
      const shown = await enrolment.subprotocols();
      expect(shown).toEqual([
        expect.stringMatching(/^fleetlearn\.credential\.[A-Za-z0-9_-]{43}$/),
        "fleetlearn.device.d",
        `fleetlearn.token.${token}`,
      ]);
      await enrolment.accepted();
      const later = new Enrolment(store, "d");
      expect(await later.subprotocols()).toEqual(shown.slice(0, 2));
      await later.rotate();
      const [, , next] = await later.subprotocols();
      expect(next).toMatch(/^fleetlearn\.next\./);
      await later.accepted();
      expect(await later.subprotocols()).toEqual([next!.replace("next", "credential"), "fleetlearn.device.d"]);
    });
  });
});

describe("a browser's database", () => {
  beforeEach(() => {
    globalThis.indexedDB = new IDBFactory();
  });

  test("a page and its worker that make the device's name at one moment have one, however they take turns", async () => {
    for (let turns = 0; turns < 12; turns++) {
      const name = `fleetlearn-${turns}`;
      const [first, second] = [await openIndexedDb(name), await openIndexedDb(name)];
      const later = async (): Promise<string> => {
        for (let turn = 0; turn < turns; turn++) await new Promise((resolve) => setImmediate(resolve));
        return readOrMakeName(second);
      };
      const names = await Promise.all([readOrMakeName(first), later()]);
      expect([turns, names[1]]).toEqual([turns, names[0]]);
      expect(await readOrMakeName(first)).toBe(names[0]);
    }
  });

  test.each([
    () => {
      throw new DOMException("not here", "SecurityError"); // cookies are blocked
    },
    () => {
      const request = {} as IDBOpenDBRequest & { error: DOMException };
      Object.assign(request, { error: new DOMException("not now", "InvalidStateError") });
      queueMicrotask(() => request.onerror?.(new Event("error"))); // as Firefox did in private windows
      return request;
    },
  ])("that is refused says what to do", async (open) => {
    globalThis.indexedDB = { open } as unknown as IDBFactory;
    await expect(openIndexedDb()).rejects.toMatchObject({
      reason: "refused",
      message: expect.stringContaining("in memory"),
    });
  });
  test("that another page deletes is lost, and whoever has claimed it is told", async () => {
    const store = await openIndexedDb();
    const told: StoreError[] = [];
    const release = await store.claim!({ lost: (error) => told.push(error) });
    await new Promise((resolve) => {
      indexedDB.deleteDatabase("fleetlearn").onsuccess = resolve;
    });
    expect(told).toMatchObject([{ reason: "lost" }]);
    await expect(store.read("a")).rejects.toMatchObject({ reason: "lost" });
    release();
  });
});
