/** The session as its owner sees it: events in, commands out. The transcripts hold a whole process to the protocol. */

import { beforeEach, describe, expect, test } from "vitest";
import { number, object, record } from "../../src/protocol/checks.ts";
import { EXCHANGE_KINDS } from "../../src/protocol/exchanges.ts";
import { packChunk } from "../../src/protocol/frames.ts";
import { name, type Question, type Report } from "../../src/protocol/messages.ts";
import type { Command, Wanted } from "../../src/session/commands.ts";
import { PATIENCE, Session } from "../../src/session/session.ts";
import { PLAIN_TASK } from "../support/tasks.ts";

const SHA = "a".repeat(64);
const MODEL = "b".repeat(64);
const TASK = PLAIN_TASK;
const { vectors } = TASK;
const EVALUATE: Question = {
  type: "question",
  task: "e1",
  kind: "evaluation",
  deadline: 100,
  phase: 1,
  content: {},
  bundle: SHA,
  vectors,
};
const REPORT: Report = {
  type: "report",
  task: "t1",
  round: 3,
  parts: [{ name: "update", encoding: "float32", size: 8, crc32: 1 }],
  examples: 20,
  steps: 6,
  epochs: 2,
  complete: true,
  loss: 1,
  metrics: {},
  seconds: 1,
  evaluation: null,
  personal: null,
  lost_tied: false,
  clipped: null,
  sealed: null,
  signature: null,
};
const WANTED: Wanted = { sha256: MODEL, name: "the model", place: `model/${MODEL}`, size: 8, limit: 8, have: 0 };

let session: Session;

/** What is commanded, without the notes: the kind, and what matters of it. */
function kinds(commands: Command[]): string[] {
  return commands.filter((one) => one.do !== "note").map((one) => (one.do === "send" ? one.message.type : one.do));
}

function hear(message: object, now = 0): string[] {
  return kinds(session.received(JSON.stringify(message), now));
}

function welcome(): string[] {
  session.connected(0);
  return hear({ type: "welcome", coordinator: "c", heartbeat: 10, chunk_bytes: 4096 });
}

/** Go to the state in which the task is in training. */
function train(): void {
  welcome();
  hear(TASK);
  session.located("t1", [], 0);
}

/** Go to the state in which the update is reported. */
function report(): void {
  train();
  session.trained(REPORT);
  session.saved("t1");
}

function grant(transfer = 7, offset = 0): string[] {
  return hear({ type: "grant", task: "t1", transfer, offset });
}

beforeEach(() => {
  session = new Session("device", 20, { exchanges: ["evaluation"], algorithms: ["scaffold"] });
});

describe("checking in", () => {
  test("says what the device is and can", () => {
    const [command] = session.connected(0, { charging: true, runtime: "onnx" });
    expect(command).toMatchObject({
      message: {
        type: "check-in",
        device: "device",
        examples: 20,
        held: null,
        charging: true,
        runtime: "onnx",
        exchanges: ["evaluation"],
      },
    });
  });
  test("names an update that an earlier process left, and reports it", () => {
    session = new Session("device", 20, { exchanges: ["evaluation"], held: REPORT });
    expect(session.connected(0)[0]).toMatchObject({ message: { held: { task: "t1", round: 3 } } });
    expect(hear({ type: "welcome", coordinator: "", heartbeat: 10, chunk_bytes: 4096 })).toEqual(["report"]);
  });
  test("a message before the welcome breaks the protocol", () => {
    session.connected(0);
    expect(session.received(JSON.stringify(TASK), 0).at(-1)).toMatchObject({ do: "close", code: 1002 });
    expect(session.faults).toBe(1);
    session.disconnected();
    session.connected(0);
    expect(kinds(session.receivedChunk(packChunk(1, 0, new Uint8Array(1)), 0))).toEqual(["close"]);
  });
  test.each(["bad-version", "bad-message"])("ends the device when it is refused with %s", (code) => {
    session = new Session("device", 20, { exchanges: ["evaluation"], untilFinished: true });
    session.connected(0);
    expect(hear({ type: "refused", code, text: "no" })).toEqual(["close"]);
    session.disconnected();
    expect([session.over, session.error?.message]).toEqual([true, expect.stringContaining("refuses the check-in")]);
  });
  test("comes back much later where the coordinator has another version, unless somebody waits for the end", () => {
    session.connected(0);
    const refused = JSON.stringify({ type: "refused", code: "bad-version", text: "version 9" });
    const commands = session.received(refused, 0);
    expect(commands.at(-1)).toMatchObject({ do: "close", after: 600 });
    expect([session.stopping, session.error]).toEqual([false, null]);
  });
  test("tries again when it is refused with busy", () => {
    session.connected(0);
    expect(hear({ type: "refused", code: "busy", text: "no" })).toEqual(["close"]);
    expect([session.stopping, session.error]).toEqual([false, null]);
  });
  test("ends where another process speaks for the device", () => {
    train();
    expect(hear({ type: "refused", code: "replaced", text: "you" })).toEqual(["stop-training", "close"]);
    expect(session.error).toMatchObject({ code: "replaced" });
  });
  test.each([1, 2, 3])("speaks version %i where the coordinator chooses it", (protocol) => {
    expect(session.connected(0)[0]).toMatchObject({ message: { protocol: 1, newest_protocol: 3 } });
    expect(hear({ type: "welcome", coordinator: "", heartbeat: 10, chunk_bytes: 4096, protocol })).toEqual([]);
    expect(session.link.is).toBe("online");
  });
  test.each([0, 4])("leaves a coordinator that chose version %i", (protocol) => {
    session.connected(0);
    const welcome = JSON.stringify({ type: "welcome", coordinator: "", heartbeat: 10, chunk_bytes: 4096, protocol });
    expect(session.received(welcome, 0).at(-1)).toMatchObject({ do: "close", code: 1002 });
    expect([session.stopping, session.error]).toEqual([false, null]);
  });
  test("a second welcome changes nothing", () => {
    welcome();
    expect(hear({ type: "welcome", coordinator: "c", heartbeat: 1, chunk_bytes: 4 })).toEqual([]);
    expect(session.link).toMatchObject({ chunkBytes: 4096 });
  });
});

test("why the last task failed is known until a result is accepted; a task that was given back did not fail", () => {
  train();
  session.ended("t1", "out-of-memory", "no room for the model");
  expect(session.failed).toBe("no room for the model");
  session.disconnected();
  welcome();
  hear({ ...TASK, task: "t2" });
  session.located("t2", [], 0);
  session.ended("t2");
  expect(session.failed).toBe("no room for the model");
  session.disconnected();
  report();
  grant();
  session.updateSent(7, 0);
  hear({ type: "accepted", task: "t1" });
  expect(session.failed).toBeNull();
});

describe("fetching", () => {
  beforeEach(() => {
    welcome();
    expect(hear(TASK)).toEqual(["locate"]);
  });
  const content = (changes: object = {}): object => {
    return { type: "content", transfer: 9, sha256: MODEL, size: 8, offset: 0, ...changes };
  };
  const fetched = (wanted = WANTED): string[] => kinds(session.located("t1", [wanted], 0));
  const chunk = (offset: number, size: number, transfer = 9): Command[] =>
    session.receivedChunk(packChunk(transfer, offset, new Uint8Array(size)), 0);

  test("chunks are stored in order, the whole is checked, and the task is looked at again", () => {
    expect(fetched()).toEqual(["fetch"]);
    expect(hear(content())).toEqual([]);
    expect(kinds(chunk(0, 4))).toEqual(["store-chunk"]);
    expect(kinds(chunk(4, 4))).toEqual(["store-chunk", "finish-content"]);
    expect(kinds(session.stored(MODEL, true, 0))).toEqual(["locate"]);
    expect(kinds(session.located("t1", [], 0))).toEqual(["start-training"]);
  });
  test("a chunk out of place, or beyond the end, closes", () => {
    fetched();
    hear(content());
    expect(chunk(4, 4).at(-1)).toMatchObject({ do: "close", code: 1002 });
    expect(session.work.is).toBe("locating");
  });
  test("a chunk beyond the size closes", () => {
    fetched();
    hear(content());
    expect(kinds(chunk(0, 12))).toEqual(["close"]);
  });
  test("chunks of another transfer and contents that nobody awaits are ignored", () => {
    fetched();
    expect(hear(content({ sha256: SHA }))).toEqual([]);
    expect(hear(content({ offset: 4 }))).toEqual([]);
    expect(chunk(0, 4)).toEqual([]);
    hear(content());
    expect(chunk(0, 4, 8)).toEqual([]);
  });
  test("a content of another size gives the task back", () => {
    fetched();
    expect(hear(content({ size: 12 }))).toEqual(["failed", "close"]);
  });
  test("a content that begins behind its end breaks the protocol", () => {
    fetched({ ...WANTED, size: null, have: 4 });
    expect(hear(content({ size: 2, offset: 4 }))).toEqual(["close"]);
  });
  test("what is lacking is not asked for while the device is offline", () => {
    session.disconnected();
    expect(fetched()).toEqual([]);
    expect(session.work.is).toBe("locating");
  });
  test("wrong bytes are fetched once more, and then the task is given back", () => {
    for (const expected of [["fetch"], ["failed", "close"]]) {
      fetched();
      hear(content());
      chunk(0, 8);
      expect(kinds(session.stored(MODEL, false, 0))).toEqual(expected);
    }
  });
  test("a difference that cannot be had is followed by the whole vector", () => {
    const delta = { ...WANTED, sha256: SHA, size: 4, limit: 4, base: SHA, instead: WANTED };
    fetched(delta);
    expect(hear({ type: "refused", code: "unknown-content", text: "no", sha256: SHA })).toEqual(["fetch"]);
    expect(session.work).toMatchObject({ is: "fetching", wanted: [WANTED] });
  });
  test("a difference that gives another vector is followed by the whole one", () => {
    fetched({ ...WANTED, sha256: SHA, size: 4, limit: 4, have: 4, base: SHA, instead: WANTED });
    expect(kinds(session.stored(SHA, false, 0))).toEqual(["fetch"]);
  });
  test("an offset that is refused is fetched from 0; other refusals give the task back", () => {
    fetched({ ...WANTED, have: 4 });
    expect(hear({ type: "refused", code: "wrong-offset", text: "no", sha256: MODEL })).toEqual(["fetch"]);
    expect(session.work).toMatchObject({ wanted: [{ have: 0 }] });
    expect(hear({ type: "refused", code: "wrong-offset", text: "no", sha256: MODEL })).toEqual(["failed", "close"]);
  });
  test("the next welcome asks again for what is lacking", () => {
    fetched();
    session.disconnected();
    expect(session.work.is).toBe("locating");
    expect(welcome()).toEqual(["heartbeat", "locate"]);
  });
  test("patience ends, and begins again with `waiting`", () => {
    fetched();
    hear({ type: "waiting", sha256: MODEL }, 50);
    session.tick(PATIENCE + 1);
    expect(session.link.is).toBe("online");
    expect(kinds(session.tick(50 + PATIENCE))).toContain("close");
  });
  test("the deadline gives the task back", () => {
    expect(kinds(session.tick(100))).toEqual(["failed", "close"]);
  });
  test("what cannot be used gives the task back", () => {
    expect(kinds(session.unusable("t1", "damaged"))).toEqual(["failed", "close"]);
    expect(session.unusable("t1", "damaged")).toEqual([]);
  });
});

describe("training", () => {
  test("the time budget leaves a part of the deadline for the upload", () => {
    welcome();
    hear({ ...TASK, time_budget: 1000 });
    expect(session.located("t1", [], 10)).toMatchObject([{ do: "start-training", seconds: 80 }]);
  });
  test("too little time gives the task back", () => {
    welcome();
    hear(TASK);
    expect(kinds(session.located("t1", [], 95))).toEqual(["failed", "close"]);
  });
  test("heartbeats tell the progress", () => {
    train();
    expect(session.due()).toBe(8);
    expect(session.tick(8, 12)).toMatchObject([{ message: { type: "heartbeat", task: "t1", steps: 12 } }]);
    expect(session.tick(9, 13)).toEqual([]);
  });
  test("a cancelled training is stopped, and the next one waits for its end", () => {
    train();
    expect(hear({ type: "cancel", task: "t1", code: "round-over" })).toEqual(["stop-training"]);
    hear({ ...TASK, task: "t2" });
    expect(session.located("t2", [], 0)).toEqual([]);
    expect(kinds(session.ended("t1"))).toEqual(["locate"]);
    expect(kinds(session.located("t2", [], 0))).toEqual(["start-training"]);
  });
  test("a failure is told, or kept for the next welcome", () => {
    train();
    session.disconnected();
    expect(kinds(session.ended("t1", "diverged", "the loss is NaN"))).toEqual([]);
    expect(welcome()).toEqual(["failed"]);
  });
  test("the same task again changes the deadline alone; another replaces it", () => {
    train();
    expect(hear({ ...TASK, deadline: 500 })).toEqual([]);
    expect(session.work).toMatchObject({ is: "training", assignment: { deadline: 500 } });
    expect(hear({ ...TASK, task: "t2" })).toEqual(["stop-training", "locate"]);
  });
  test("an update that is saved after its task ended is dropped", () => {
    train();
    expect(kinds(session.trained(REPORT))).toEqual(["save-update"]);
    hear({ type: "cancel", task: "t1", code: "round-over" });
    expect(kinds(session.saved("t1"))).toEqual(["drop-update"]);
  });
  test("training that ends after its task did is nothing", () => {
    train();
    hear({ type: "cancel", task: "t1", code: "round-over" });
    expect(session.trained(REPORT)).toEqual([]);
    expect(session.runningTask).toBeNull();
  });
  test("what the device does not know gives the task back", () => {
    welcome();
    for (const [task, changes] of Object.entries({
      a: { algorithm: "later" },
      b: { parts: { update: "later" } },
      c: { parts: { update: "float32", later: "float32" } },
      d: { vectors: [{ ...vectors[0], encoding: "int8" }] },
      e: { algorithm: "scaffold" },
    })) {
      expect(hear({ ...TASK, ...changes, task }), task).toEqual(["failed", "close"]);
      session.disconnected();
      welcome();
    }
  });
});

describe("reporting", () => {
  test("only a durable update is reported; it is uploaded, acknowledged and forgotten", () => {
    train();
    session.trained(REPORT);
    expect(kinds(session.saved("t1"))).toEqual(["report"]);
    expect(grant(7, 4)).toEqual(["send-update"]);
    expect(grant(7, 4)).toEqual([]);
    expect(session.updateSent(8, 0)).toEqual([]);
    expect(kinds(session.updateSent(7, 0))).toEqual(["uploaded"]);
    session.faults = 2;
    expect(hear({ type: "accepted", task: "t1" })).toEqual(["drop-update"]);
    expect([session.work.is, session.faults]).toEqual(["idle", 0]);
    expect(hear(TASK)).toEqual([]); // it has ended, so it is not begun again
  });
  test("an upload that loses its place is reported again", () => {
    report();
    grant();
    expect(hear({ type: "waiting", task: "t1" })).toEqual(["stop-update", "report"]);
    expect(hear({ type: "waiting", task: "t1" })).toEqual([]);
    expect(grant(8)).toEqual(["send-update"]);
  });
  test("wrong-offset waits for a grant, wrong-hash reports again once", () => {
    report();
    grant();
    expect(hear({ type: "refused", code: "wrong-offset", text: "", task: "t1" })).toEqual(["stop-update"]);
    grant(8);
    expect(hear({ type: "refused", code: "wrong-hash", text: "", task: "t1" })).toEqual(["stop-update", "report"]);
    grant(9);
    expect(hear({ type: "refused", code: "wrong-hash", text: "", task: "t1" })).toEqual(["drop-update"]);
  });
  test("busy closes and keeps the update; duplicate is nothing; others forget it", () => {
    report();
    expect(hear({ type: "refused", code: "duplicate", text: "", task: "t1" })).toEqual([]);
    expect(hear({ type: "refused", code: "busy", text: "", task: "t1" })).toEqual(["close"]);
    session.disconnected();
    expect(welcome()).toEqual(["report"]);
    expect(hear({ type: "refused", code: "stale-round", text: "", task: "t1" })).toEqual(["drop-update"]);
  });
  test("a grant beyond the end, or before the report, breaks the protocol", () => {
    report();
    expect(grant(7, 12)).toEqual(["close"]);
    session = new Session("device", 20, { exchanges: ["evaluation"] });
    train();
    expect(grant()).toEqual(["close"]);
  });
  test("a refusal while the update is being saved ends its task", () => {
    train();
    session.trained(REPORT);
    expect(hear({ type: "refused", code: "not-wanted", text: "", task: "t1" })).toEqual([]);
    expect(kinds(session.saved("t1"))).toEqual(["drop-update"]);
  });
  test("a cut upload begins again with the report", () => {
    report();
    grant();
    session.disconnected();
    expect(session.connected(0)[0]).toMatchObject({ message: { held: { task: "t1" } } });
    expect(session.work.is).toBe("holding");
  });
  test("what is said of another task is ignored", () => {
    report();
    for (const type of ["accepted", "cancel", "refused", "grant"]) {
      const fields = { code: "stale-round", text: "", transfer: 3, offset: 0 };
      expect(hear({ type, task: "other", ...fields }), type).toEqual([]);
    }
  });
});

describe("a quiet coordinator", () => {
  const KNOWN = { sha256: SHA, size: 99 };
  /** Let this much time pass, a second at a time. Returns what is commanded beside heartbeats. */
  const pass = (from: number, to: number): string[] => {
    const found: string[] = [];
    for (let now = from; now <= to; now++) found.push(...kinds(session.tick(now)));
    return found.filter((kind) => kind !== "heartbeat");
  };

  test("is asked for nothing of what it has, and any answer will do", () => {
    welcome();
    session.known = KNOWN;
    expect(pass(1, PATIENCE - 1)).toEqual([]);
    expect(session.tick(PATIENCE)).toMatchObject([{ message: { type: "fetch", sha256: SHA, offset: 99 } }]);
    const answer = { type: "content", transfer: 3, sha256: SHA, size: 99, offset: 99 };
    expect(session.received(JSON.stringify(answer), PATIENCE + 1)).toEqual([]);
    expect(pass(PATIENCE + 1, 2 * PATIENCE)).toEqual([]);
    expect(pass(2 * PATIENCE + 1, 2 * PATIENCE + 1)).toEqual(["fetch"]);
  });
  test("that does not answer is left, and asked again on the next connection", () => {
    report(); // the grant may take as long as the round
    session.known = KNOWN;
    expect(pass(1, 2 * PATIENCE)).toEqual(["fetch", "close"]);
    session.disconnected();
    expect(welcome()).toEqual(["report"]);
    expect(pass(1, PATIENCE)).toEqual(["fetch"]);
  });
  test("that no longer has it is not asked again", () => {
    welcome();
    session.known = KNOWN;
    expect(pass(1, PATIENCE)).toEqual(["fetch"]);
    expect(hear({ type: "refused", code: "unknown-content", text: "no", sha256: SHA }, PATIENCE)).toEqual([]);
    expect(pass(PATIENCE, 3 * PATIENCE)).toEqual([]);
  });
  test("is not asked during an upload, whose end has a patience of its own", () => {
    report();
    session.known = KNOWN;
    grant();
    expect(pass(1, 2 * PATIENCE)).toEqual([]);
  });
  test("has ended the connection after three heartbeats of the device's silence", () => {
    expect(session.silence).toBeNull();
    welcome();
    expect(session.silence).toBe(30);
  });
});

describe("evaluating", () => {
  const measured = {
    type: "reply",
    task: "e1",
    kind: "evaluation",
    content: { examples: 20, loss_sum: 1, metric_sums: {} },
    seconds: 1,
  } as const;
  test("the result is sent until it is answered", () => {
    welcome();
    expect(hear(EVALUATE)).toEqual(["locate"]);
    expect(kinds(session.located("e1", [], 0))).toEqual(["start-answer"]);
    expect(kinds(session.answered(measured))).toEqual(["reply"]);
    session.disconnected();
    expect(welcome()).toEqual(["reply"]);
    expect(hear({ type: "accepted", task: "e1" })).toEqual([]);
    expect(session.work.is).toBe("idle");
  });
});

describe("ending", () => {
  test("come-back closes, and says when", () => {
    welcome();
    const commands = session.received('{"type":"come-back","after":30,"reason":"no-task"}', 0);
    expect(commands).toMatchObject([{ do: "close", after: 30, code: 1000 }]);
    expect(hear(TASK)).toEqual([]); // nothing that still arrives is heard
  });
  test("come-back ends the device when training is finished, where it is to", () => {
    session = new Session("device", 20, { exchanges: ["evaluation"], untilFinished: true });
    welcome();
    expect(hear({ type: "come-back", after: 30, reason: "finished" })).toEqual(["close"]);
    session.disconnected();
    expect([session.finished, session.over]).toEqual([true, true]);
  });
  test("stopping gives the task back, and waits for the training's end", () => {
    train();
    expect(kinds(session.stop())).toEqual(["failed", "stop-training", "close"]);
    session.disconnected();
    expect(session.over).toBe(false);
    session.ended("t1");
    expect(session.over).toBe(true);
    expect(kinds(session.connected(0))).toEqual(["close"]);
  });
  test("pausing gives the task back by its own code, and says why", () => {
    train();
    const [failed, ...others] = session.stop("the device waits until it charges");
    const message = { type: "failed", task: "t1", code: "paused", text: "the device waits until it charges" };
    expect(failed).toEqual({ do: "send", message });
    expect(kinds(others)).toEqual(["stop-training", "close"]);
  });
  test("pausing keeps a finished update", () => {
    report();
    expect(session.stop("the device waits until it charges")).toMatchObject([
      { do: "close", reason: "paused: the device waits until it charges" },
    ]);
    expect(session.work.is).toBe("holding");
  });
  test("stopping keeps a finished update", () => {
    report();
    expect(kinds(session.stop())).toEqual(["close"]);
    expect(session.work.is).toBe("holding");
  });
  test("a device that cannot go on says so", () => {
    train();
    expect(kinds(session.abandon(new Error("the data do not fit"), "bad-data"))).toContain("failed");
    expect(session.error?.message).toBe("the data do not fit");
    session = new Session("device", 20, { exchanges: ["evaluation"] });
    welcome();
    expect(kinds(session.abandon(new Error("full"), "disk-full"))).toEqual(["close"]);
  });
  test("a refusal of nothing closes", () => {
    welcome();
    expect(hear({ type: "refused", code: "out-of-turn", text: "" })).toEqual(["close"]);
  });
});

describe("an exchange that only tests have, of three phases", () => {
  const KIND = "roll-call";
  const asked = (phase: number, who: Record<string, number>): Question => ({
    type: "question",
    task: `r1.${phase}-1`,
    kind: KIND,
    deadline: 100,
    phase,
    content: { who },
    bundle: null,
    vectors: [],
  });
  EXCHANGE_KINDS[KIND] = {
    question: object({ who: record(name, number(), 64) }),
    reply: object({ number: number() }),
    vectors: [],
  };
  const joined = () => {
    const session = new Session("device", 20, { exchanges: [KIND] });
    session.connected(0);
    session.received(JSON.stringify({ type: "welcome", coordinator: "c", heartbeat: 10, chunk_bytes: 4096 }), 0);
    return session;
  };
  const tell = (session: Session, message: object) =>
    session.received(JSON.stringify(message), 0).filter((command) => command.do !== "note");

  test("each phase is a task: looked up, worked out, answered, forgotten when it is accepted", () => {
    const session = joined();
    for (const phase of [1, 2, 3]) {
      const question = asked(phase, phase === 1 ? {} : { a: 1 });
      expect(tell(session, question)).toEqual([{ do: "locate", task: question }]);
      const [start] = session.located(question.task, [], 0);
      expect(start).toMatchObject({ do: "start-answer", task: question });
      const reply = { type: "reply" as const, task: question.task, kind: KIND, content: { number: 1 }, seconds: 0 };
      expect(session.answered(reply)).toEqual([{ do: "send", message: reply }]);
      expect(tell(session, { type: "accepted", task: question.task })).toEqual([]);
      expect(session.task).toBeNull();
    }
  });

  test("a question of another kind, or without what the kind says, is not worked on", () => {
    const session = joined();
    const [failed] = tell(session, { ...asked(1, {}), kind: "gossip" });
    expect(failed).toMatchObject({ do: "send", message: { type: "failed", code: "unsupported" } });
    const other = joined();
    const [closed] = tell(other, { ...asked(1, {}), content: {} });
    expect(closed).toMatchObject({ do: "close", code: 1002 });
  });
});
