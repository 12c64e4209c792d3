/** A session whose device was given keys: what is signed is done, all else is refused, and what it works on stays. */

import { expect, test } from "vitest";
import type { CheckIn, FromDevice, Signed } from "../../src/protocol/messages.ts";
import type { Command } from "../../src/session/commands.ts";
import { Session } from "../../src/session/session.ts";

const OURS = "ab".repeat(32);
const THEIRS = "cd".repeat(32);
const CHALLENGE = "01".repeat(32);
const vectors = [{ name: "model", sha256: "a".repeat(64), size: 8, encoding: "float32" }];
const EVALUATE = {
  type: "question",
  task: "e1",
  kind: "evaluation",
  deadline: 100,
  bundle: "b".repeat(64),
  vectors,
};

function task(name = "t1"): object {
  const hyper = { lr: 0.1 };
  const more = { round: 1, parts: { update: "float32" }, hyper, epochs: 1, batch_size: 8, seed: 5 };
  return { ...EVALUATE, ...more, type: "task", task: name };
}

function signed(message: object, key = OURS): Signed {
  return { type: "signed", message: JSON.stringify(message), key, signature: "ef".repeat(64) };
}

function online(session: Session): CheckIn {
  const [sent] = session.connected(0, { challenge: CHALLENGE });
  tell(session, { type: "welcome", coordinator: "c", heartbeat: 10, chunk_bytes: 4096 });
  return messagesOf([sent!])[0] as CheckIn;
}

function begun(trusted = [OURS]): Session {
  const session = new Session("dev", 7, { exchanges: ["evaluation"], trusted });
  online(session);
  return session;
}

/** Say it. What the session wants to have checked is `good`, or not. */
function tell(session: Session, message: object, good = true): Command[] {
  return session.received(JSON.stringify(message), 0).flatMap((command) => {
    return command.do === "verify" ? session.verified(command.signed, good, 0) : [command];
  });
}

function messagesOf(commands: Command[]): FromDevice[] {
  return commands.flatMap((command) => (command.do === "send" ? [command.message] : []));
}

function kinds(commands: Command[]): string[] {
  return commands.filter((command) => command.do !== "note").map((command) => command.do);
}

function expectRefused(commands: Command[], words: string): void {
  expect(kinds(commands)).toEqual(["send", "close"]);
  const text = expect.stringContaining(words);
  expect(messagesOf(commands)).toEqual([{ type: "failed", task: "t1", code: "untrusted", text }]);
}

test("a signed task is begun, and a signed evaluation", () => {
  const session = new Session("dev", 7, { exchanges: ["evaluation"], trusted: [OURS] });
  expect(online(session)).toMatchObject({ trusts: [OURS], challenge: CHALLENGE });
  expect(kinds(tell(session, signed(task())))).toEqual(["locate"]);
  expect(kinds(tell(session, signed(EVALUATE)))).toEqual(["locate"]);
});

test("what is checked is the text with the challenge and the device's name", () => {
  const message = signed(task());
  const [command] = begun().received(JSON.stringify(message), 0);
  const content = new TextEncoder().encode(`fleetlearn.v1 signed message\n${CHALLENGE}\ndev\n${message.message}`);
  expect(command).toMatchObject({ do: "verify", signed: message, content });
});

test("nothing is done before the signature was checked, nor if the connection is another then", () => {
  const session = begun();
  const [command] = session.received(JSON.stringify(signed(task())), 0);
  expect(session.task).toBeNull();
  session.disconnected();
  online(session);
  expect(session.verified((command as { signed: Signed }).signed, true, 0)).toEqual([]);
  expect(session.verified(signed(task()), true, 0)).toEqual([]); // another than the one that was to be checked
  expect(session.task).toBeNull();
});

test("a task without a signature, with a wrong one, or by another key is given back", () => {
  const session = begun();
  expectRefused(tell(session, task()), "it is not signed, and this device does only what is");
  expect(session.faults).toBe(1);
  expectRefused(tell(begun(), signed(task()), false), "its signature is wrong");
  const words = `signed with the key ${THEIRS}; this device trusts ${OURS}`;
  expectRefused(tell(begun(), signed(task(), THEIRS)), words);
});

test.each(["t1", "t2"])("what the device works on stays: %s", (name) => {
  const session = begun();
  tell(session, signed(task()));
  session.located("t1", [], 0);
  const commands = tell(session, task(name));
  // The real task must not be ended by a message about it.
  expect(kinds(commands)).toEqual(name === "t1" ? ["close"] : ["send", "close"]);
  expect(session.work.is).toBe("training");
  session.disconnected();
  online(session);
  expect(session.task).toBe("t1");
});

test("only tasks and keys are signed, and only for a device that has keys", () => {
  const grant = { type: "grant", task: "t1", transfer: 1, offset: 0 };
  expect(tell(begun(), signed(grant))).toMatchObject([{ do: "close", code: 1002 }]);
  expect(tell(begun(), { ...signed(task()), message: "{" })).toMatchObject([{ do: "close", code: 1002 }]);
  const session = new Session("dev", 7);
  expect(online(session)).toMatchObject({ trusts: [], challenge: CHALLENGE });
  expect(tell(session, signed(task()))).toMatchObject([{ do: "close", code: 1002 }]);
});

test("new keys take the place of those before, from this message on", () => {
  const session = begun();
  const keys = [THEIRS, OURS];
  expect(tell(session, signed({ type: "trust", keys })).at(-1)).toEqual({ do: "save-trusted", keys });
  tell(session, signed({ type: "trust", keys: [THEIRS] }, THEIRS));
  expectRefused(tell(session, signed(task())), `this device trusts ${THEIRS}`);
  session.disconnected();
  expect(online(session).trusts).toEqual([THEIRS]);
});

test("new keys without a good signature change nothing", () => {
  const trust = { type: "trust", keys: [THEIRS] };
  for (const [message, good] of [
    [trust, true],
    [signed(trust), false],
    [signed(trust, THEIRS), true],
  ] as const) {
    const session = begun();
    tell(session, signed(task()));
    expect(kinds(tell(session, message, good))).toEqual(["close"]);
    expect(session.trusted).toEqual([OURS]);
    expect(session.task).toBe("t1");
  }
});
