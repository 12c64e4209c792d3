/** Tasks with secure aggregation: what is given back, by which words; and that one mask is made for a task. */

import { beforeEach, describe, expect, test } from "vitest";
import type { Question, Report, Task } from "../../src/protocol/messages.ts";
import type { Command } from "../../src/session/commands.ts";
import { checkSecureDemands, type SecureDemands } from "../../src/session/secure_tasks.ts";
import { Session } from "../../src/session/session.ts";
import { HELPER, SECURE, SECURE_TASK } from "../support/tasks.ts";

const TASK: Task = { ...SECURE_TASK, task: "5eed-3-1" };
const STALE: Task = { ...TASK, secure: { ...SECURE, least_factor: 0.25 } };
const QUESTION: Question = {
  type: "question",
  task: "e1",
  kind: "evaluation",
  deadline: 100,
  phase: 1,
  content: {},
  bundle: TASK.bundle,
  vectors: TASK.vectors,
};
const REPORT: Report = {
  type: "report",
  task: TASK.task,
  round: 3,
  parts: [{ name: "update", encoding: "masked", size: 12, crc32: 1 }],
  examples: 1,
  steps: 1,
  epochs: 2,
  complete: true,
  loss: 0,
  metrics: {},
  seconds: 0,
  evaluation: null,
  personal: null,
  lost_tied: false,
  clipped: null,
  sealed: "d".repeat(160),
  signature: "e".repeat(128),
};

let session: Session;

function make(demands: SecureDemands = {}, held: Report | Task | null = null): void {
  session = new Session("device", 20, { exchanges: ["evaluation"], algorithms: ["feddyn", "scaffold"], demands, held });
}

/** The kinds of the commands without the notes; of messages, their types. */
function kinds(commands: Command[]): string[] {
  return commands.filter((one) => one.do !== "note").map((one) => (one.do === "send" ? one.message.type : one.do));
}

function say(message: object): Command[] {
  return session.received(JSON.stringify(message), 0);
}

function welcome(): string[] {
  session.connected(0);
  return kinds(say({ type: "welcome", coordinator: "c", heartbeat: 10, chunk_bytes: 4096 }));
}

/** Return the `failed` with which a task is answered, or null where it is begun. */
function given(task: Task | Question): { code: string; text: string } | null {
  welcome();
  const commands = say(task).filter((one) => one.do === "send");
  return (commands[0]?.message as { code: string; text: string } | undefined) ?? null;
}

/** Go to the state in which the trained update waits for its factor. */
function finish(): string[] {
  welcome();
  say(STALE);
  session.located(STALE.task, [], 0);
  session.trained(STALE);
  return kinds(session.saved(STALE.task));
}

function weigh(factor: number): Command[] {
  return say({ type: "weighing", task: STALE.task, factor });
}

beforeEach(() => make());

describe("what a device says of itself", () => {
  test.each<[SecureDemands, string[]]>([
    [{}, ["clip", "secure"]],
    [{ require: false, minimum: 5 }, ["clip", "secure"]],
    [{ require: true }, ["clip", "secure", "secure-required"]],
  ])("with the demands %o", (demands, privacy) => {
    make(demands);
    const exchanges = demands.require === true ? [] : ["evaluation"];
    expect(session.connected(0)[0]).toMatchObject({ message: { privacy, exchanges } });
  });
});

describe("what its owner demands", () => {
  const plain: Task = { ...TASK, secure: null, parts: { update: "float32" } };
  test.each<[string, SecureDemands, Task | Question, string | null, string?]>([
    ["nothing, and gets a mask", {}, TASK, null],
    ["nothing, and gets none", {}, plain, null],
    ["nothing, and is asked", {}, QUESTION, null],
    ["all that the task keeps", { require: true, helper: HELPER, minimum: 3, leastFactor: 0.25 }, STALE, null],
    ["all that a task without staleness keeps", { leastFactor: 1 }, TASK, null],
    ["a mask", { require: true }, plain, "the task asks for the update as it is (no `secure`)", "unsupported"],
    [
      "a mask, and is asked",
      { require: true },
      QUESTION,
      "the question evaluation tells of this device",
      "unsupported",
    ],
    ["another helper", { helper: "f".repeat(64) }, TASK, `the task names the helper with the key ${HELPER}`],
    [
      "a helper, and there is none",
      { helper: HELPER },
      { ...TASK, secure: { ...SECURE, helper: null } },
      "names no helper",
    ],
    [
      "more devices",
      { minimum: 4 },
      TASK,
      "the updates of 3 devices be added up, and this device's owner wants at least 4",
    ],
    [
      "a mask, and says nothing of late updates",
      { require: true },
      STALE,
      "be added to this one, so that a sum may be nearly one device's update",
    ],
    [
      "a fresher update",
      { leastFactor: 0.5 },
      STALE,
      "count for 0.25 of itself, and this device's owner wants at least 0.5",
    ],
  ])("%s", (_, demands, task, why, code = "untrusted") => {
    make(demands);
    if (why === null) expect(given(task)).toBeNull();
    else expect(given(task)).toMatchObject({ code, text: expect.stringContaining(why) });
  });

  test.each<[SecureDemands, string]>([
    [{ helper: "abc" }, "secure.helper is abc"],
    [{ helper: HELPER.toUpperCase() }, "expected 64 of 0-9 and a-f"],
    [{ minimum: 1 }, "secure.minimum is 1; expected 2 to 65537"],
    [{ minimum: 65538 }, "secure.minimum is 65538"],
    [{ minimum: 2.5 }, "secure.minimum is 2.5"],
    [{ leastFactor: 0 }, "secure.leastFactor is 0"],
    [{ leastFactor: 1.5 }, "secure.leastFactor is 1.5"],
  ])("that makes no sense is an error: %o", (demands, text) => {
    expect(() => checkSecureDemands(demands)).toThrow(text);
  });
});

describe("a task that cannot be masked here is given back", () => {
  test.each<[string, Partial<Task>, string]>([
    ["pairwise", { secure: { ...SECURE, mode: "pairwise" } }, 'in the mode "pairwise"; this device knows helper'],
    ["no helper", { secure: { ...SECURE, helper: null } }, "names no helper's key"],
    ["noise", { secure: { ...SECURE, noise: 2 } }, "with noise below the mask"],
    ["noise before it", { local_noise: 0.5 }, "with noise before it"],
    ["no bound", { clip: null }, "does not bound it (`clip`)"],
    ["kept dual", { algorithm: "feddyn" }, "to train with feddyn"],
    ["no mask asked for", { parts: { update: "float32" } }, "and for it as float32; expected masked"],
    [
      "a part beside it",
      { parts: { update: "masked", buffers: "float32" } },
      "for the part buffers, which the mask does",
    ],
    ["another part alone", { parts: { other: "masked" } }, "for the part other"],
    [
      "too many",
      { secure: { ...SECURE, bits: 24, minimum: 257 } },
      "of 24 bits, of which 256 can be added modulo 2^32",
    ],
    ["short words", { secure: { ...SECURE, bits: 12 } }, "of 12 bits, and for it as masked; expected masked24"],
    ["long words", { parts: { update: "masked24" } }, "of 20 bits, and for it as masked24; expected masked"],
    [
      "too many short ones",
      { parts: { update: "masked24" }, secure: { ...SECURE, bits: 12, minimum: 4098 } },
      "of 12 bits, of which 4097 can be added modulo 2^24",
    ],
    [
      "masked without secure",
      { secure: null },
      "asks for the parts update (masked); this device knows update (float32",
    ],
  ])("%s", (_, changes, text) => {
    expect(given({ ...TASK, ...changes })).toMatchObject({ code: "unsupported", text: expect.stringContaining(text) });
  });
});

describe("a failure", () => {
  function fail(task: Task): Command[] {
    welcome();
    say(task);
    session.located(task.task, [], 0);
    return session.ended(task.task, "diverged", "element 7 is NaN");
  }

  test("of a masked task does not tell the coordinator of the data, and tells the owner", () => {
    expect(fail(TASK)).toContainEqual({ do: "note", warning: true, text: expect.stringContaining("element 7 is NaN") });
    expect(session.failed).toBe("element 7 is NaN");
    make();
    const sent = fail(TASK).find((one) => one.do === "send");
    expect(sent).toMatchObject({ message: { code: "diverged", text: expect.stringContaining("why is not told") } });
  });
  test("of another task tells both", () => {
    const sent = fail({ ...TASK, secure: null, parts: { update: "float32" } }).find((one) => one.do === "send");
    expect(sent).toMatchObject({ message: { code: "diverged", text: "element 7 is NaN" } });
  });
});

describe("an update whose staleness is not known yet", () => {
  test("is saved without a mask, asked about, masked, saved, and then reported", () => {
    expect(finish()).toEqual(["finished"]);
    expect(session.work.is).toBe("unweighed");
    expect(weigh(0.5)).toContainEqual({ do: "mask-update", task: STALE, factor: 0.5 });
    expect(session.runningTask).toBe(STALE.task);
    expect(kinds(session.masked(REPORT))).toEqual(["report"]);
    expect(session.work).toEqual({ is: "holding", report: REPORT, reportedAgain: false });
    expect(session.runningTask).toBeNull();
  });
  test("is asked about again on each connection, and named at the check-in", () => {
    finish();
    session.disconnected();
    expect(session.connected(0)[0]).toMatchObject({ message: { held: { task: STALE.task, round: 3 } } });
    expect(kinds(say({ type: "welcome", coordinator: "", heartbeat: 10, chunk_bytes: 4096 }))).toEqual(["finished"]);
  });
  test("that an earlier process left is asked about, and not masked before it is weighed", () => {
    make({}, STALE);
    expect(welcome()).toEqual(["finished"]);
    expect(kinds(weigh(1))).toEqual(["mask-update"]);
  });
  test("whose factor is less than was promised is given back and deleted", () => {
    finish();
    const commands = weigh(0.2499);
    expect(kinds(commands)).toEqual(["failed", "drop-update", "close"]);
    expect(commands.find((one) => one.do === "send")).toMatchObject({
      message: { code: "untrusted", text: expect.stringContaining("was to count for 0.2499 of itself") },
    });
  });
  test("a factor above 1 breaks the protocol, and the update stays", () => {
    finish();
    expect(weigh(1.5).at(-1)).toMatchObject({ do: "close", code: 1002 });
    expect(session.work.is).toBe("unweighed");
  });
  test("is masked once, however often a factor comes", () => {
    finish();
    weigh(0.5);
    expect(kinds(weigh(0.75))).toEqual([]);
    session.disconnected();
    welcome();
    expect(kinds(weigh(0.75))).toEqual([]); // while the first mask is made
    session.masked(REPORT);
    expect(kinds(weigh(0.75))).toEqual([]);
  });
  test("a factor for a task in training, for another task and for none is ignored", () => {
    welcome();
    expect(kinds(weigh(0.5))).toEqual([]);
    say(STALE);
    session.located(STALE.task, [], 0);
    expect(kinds(weigh(0.5))).toEqual([]);
    session.trained(STALE);
    session.saved(STALE.task);
    expect(kinds(say({ type: "weighing", task: "another", factor: 0.5 }))).toEqual([]);
  });
  test("that was cancelled is deleted, also while the mask is made", () => {
    finish();
    expect(kinds(say({ type: "cancel", task: STALE.task, code: "round-over" }))).toEqual(["drop-update"]);
    make();
    finish();
    weigh(0.5);
    expect(kinds(say({ type: "cancel", task: STALE.task, code: "round-over" }))).toEqual(["drop-update"]);
    expect(session.runningTask).toBe(STALE.task);
    expect(kinds(session.masked(REPORT))).toEqual(["drop-update"]); // what was saved meanwhile
    expect(session.work.is).toBe("idle");
  });
  test("that the coordinator accepted before is forgotten", () => {
    finish();
    expect(kinds(say({ type: "accepted", task: STALE.task }))).toEqual(["drop-update"]);
  });
  test("stays for the next start where the device stops; one that is being masked is waited for", () => {
    finish();
    weigh(0.5);
    session.stop();
    session.disconnected();
    expect(session.over).toBe(false);
    session.masked(REPORT);
    expect(session.over).toBe(true);
    expect(session.work.is).toBe("holding");
  });
  test("that could not be masked is given back", () => {
    finish();
    weigh(0.5);
    const commands = session.ended(STALE.task, "runtime-error", "no code");
    expect(kinds(commands)).toEqual(["failed", "drop-update", "close"]);
  });
  test("is given back where the store is lost while it is masked", () => {
    finish();
    weigh(0.5);
    expect(kinds(session.abandon(new Error("lost"), "runtime-error"))).toEqual(["failed", "drop-update", "close"]);
  });
});
