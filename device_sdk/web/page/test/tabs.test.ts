import "fake-indexeddb/auto";
import { afterEach, beforeEach, describe, expect, test, vi } from "vitest";
import { type Choices, deleteDatabase, NOTHING_CHOSEN, openRecords, type Records } from "../shell/records.ts";
import { changesOf, type Shared, Tabs } from "../shell/tabs.ts";

const drawing = (id: number) => ({ id, label: 1, strokes: [], pixels: new Uint8Array(64) });
const shared = (choices: Partial<Choices>, ids: number[] = []): Shared => ({
  choices: { ...NOTHING_CHOSEN, joined: "ws://here/", ...choices },
  drawings: ids.map(drawing),
});
const NONE = { left: false, training: null, paused: null, conditions: false, drawings: null };

describe("what another tab did", () => {
  test.each([
    ["nothing", {}, [1, 2], {}],
    ["counted an update", { accepted: 3, acceptedBytes: 9, admitted: true }, [1, 2], {}],
    ["left", { joined: null, training: false }, [1, 2], { left: true, training: false }],
    ["joined another coordinator", { joined: "ws://there/" }, [1, 2], { left: true }],
    ["paused", { paused: true }, [1, 2], { paused: true }],
    ["ended the training", { training: false }, [1, 2], { training: false }],
    ["changed a condition", { charging: true }, [1, 2], { conditions: true }],
    ["kept a drawing", {}, [1, 2, 3], { drawings: "more" }],
    ["deleted a drawing", {}, [2], { drawings: "deleted" }],
    ["deleted one and kept two", {}, [2, 3, 4], { drawings: "deleted" }],
  ])("%s", (_, choices, ids, changes) => {
    const before = shared({ training: true }, [1, 2]);
    expect(changesOf(before, shared({ training: true, ...choices }, ids))).toEqual({ ...NONE, ...changes });
  });
  test("began again", () => {
    expect(changesOf(shared({ paused: true }), shared({ training: true }))).toMatchObject({
      paused: false,
      training: true,
    });
  });
});

describe("a tab", () => {
  let page: EventTarget & { visibilityState?: string };
  let tabs: { tell(): void }[];
  beforeEach(() => {
    page = Object.assign(new EventTarget(), { visibilityState: "visible" });
    vi.stubGlobal("document", page);
    vi.stubGlobal("addEventListener", page.addEventListener.bind(page));
    tabs = [];
  });
  afterEach(() => vi.unstubAllGlobals());

  test("hears of what another one changes, and not of its own changes", async () => {
    const own = vi.fn();
    const heard = new Promise<void>((resolve) => tabs.push(new Tabs(resolve)));
    tabs.push(new Tabs(own));
    tabs[1]!.tell();
    await heard;
    expect(own).not.toHaveBeenCalled();
  });
  test("looks again when it is shown, and when it was frozen: it may have missed something", () => {
    const changed = vi.fn();
    tabs.push(new Tabs(changed));
    for (const name of ["visibilitychange", "resume", "pageshow"]) page.dispatchEvent(new Event(name));
    expect(changed).toHaveBeenCalledTimes(3);
    page.visibilityState = "hidden";
    page.dispatchEvent(new Event("visibilitychange"));
    expect(changed).toHaveBeenCalledTimes(3);
  });
});

describe("records that another tab erases", () => {
  let one: Records;
  let other: Records;
  beforeEach(async () => {
    await deleteDatabase("fleetlearn-page");
    [one, other] = [await openRecords(), await openRecords()];
    await one.add(drawing(1));
    await one.choose((now) => ({ ...now, joined: "ws://here/" }));
  });

  test("are empty for a tab that has not heard of it", async () => {
    await one.clear();
    expect(await other.drawings()).toEqual([]);
    expect(await other.choices()).toEqual(NOTHING_CHOSEN);
  });
  test("are let go, which the page is told, and the erasing ends", async () => {
    const gone = vi.fn();
    other.onGone(gone);
    await one.erase();
    expect(gone).toHaveBeenCalledTimes(1);
    await expect(other.choices()).rejects.toThrow();
    expect(await indexedDB.databases()).toEqual([]);
  });
});
