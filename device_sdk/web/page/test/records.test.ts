import "fake-indexeddb/auto";
import { beforeEach, describe, expect, test, vi } from "vitest";
import { deleteDatabase, NOTHING_CHOSEN, openRecords, type Records } from "../shell/records.ts";

const drawing = (label: number) => ({
  label,
  strokes: [[[0.5, 0.25] as const]],
  pixels: new Uint8Array(64).fill(label),
});
const labels = async (records: Records): Promise<number[]> => (await records.drawings()).map(({ label }) => label);

beforeEach(() => deleteDatabase("fleetlearn-page"));

describe.each(["in the browser's database", "in memory"])("records %s", (where) => {
  const open = async (): Promise<Records> => {
    if (where === "in memory") {
      const refused = vi.spyOn(indexedDB, "open").mockImplementation(() => {
        throw new DOMException("a private window", "SecurityError");
      });
      const records = await openRecords();
      refused.mockRestore();
      return records;
    }
    return openRecords();
  };

  test("drawings are kept in order, each with its own number", async () => {
    const records = await open();
    expect(records.lasting).toBe(where !== "in memory");
    for (const label of [7, 1, 7]) await records.add(drawing(label));
    const kept = await records.drawings();
    expect(kept.map(({ id: _, ...rest }) => rest)).toEqual([7, 1, 7].map(drawing));
    await records.remove(kept[0]!.id);
    expect(await labels(records)).toEqual([1, 7]);
    await records.add(drawing(4));
    expect(await labels(records)).toEqual([1, 7, 4]);
  });

  test("a choice changes what it names", async () => {
    const records = await open();
    expect(await records.choices()).toEqual(NOTHING_CHOSEN);
    await records.choose((now) => ({ ...now, joined: "wss://host/", accepted: now.accepted + 2 }));
    const chosen = await records.choose((now) => ({ ...now, accepted: now.accepted + 1 }));
    expect(chosen).toEqual({ ...NOTHING_CHOSEN, joined: "wss://host/", accepted: 3 });
    expect(await records.choices()).toEqual(chosen);
  });

  test("erased is erased", async () => {
    const records = await open();
    await records.add(drawing(3));
    await records.choose((now) => ({ ...now, paused: true }));
    await records.erase();
    const later = await open();
    expect([await later.drawings(), await later.choices()]).toEqual([[], NOTHING_CHOSEN]);
  });
});

test("two tabs do not undo each other's choices", async () => {
  const [one, other] = [await openRecords(), await openRecords()];
  await Promise.all(
    [one, other, one].map((records) => records.choose((now) => ({ ...now, accepted: now.accepted + 1 }))),
  );
  await other.choose((now) => ({ ...now, awake: true }));
  expect(await one.choices()).toMatchObject({ accepted: 3, awake: true });
});

test("a tab that has the database open lets another erase it", async () => {
  const [one, other] = [await openRecords(), await openRecords()];
  await one.add(drawing(1));
  await other.erase();
  expect(await labels(await openRecords())).toEqual([]);
  await expect(one.add(drawing(2))).rejects.toThrow();
});
