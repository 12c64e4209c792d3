/** Large contents: parts that are asked for one after the other, and HTTP. What waits in memory is bounded, also where the
 * store is slow. */

import { createServer, type Server } from "node:http";
import type { AddressInfo } from "node:net";
import { afterEach, beforeEach, describe, expect, test, vi } from "vitest";
import { Driver } from "../src/driver/driver.ts";
import { httpParts } from "../src/driver/http_fetch.ts";
import { TIMING } from "../src/driver/timing.ts";
import { packChunk } from "../src/protocol/frames.ts";
import type { Content, Task } from "../src/protocol/messages.ts";
import type { Command, Wanted } from "../src/session/commands.ts";
import { httpHosts, whyNotFrom } from "../src/session/http_sources.ts";
import { PART, Session } from "../src/session/session.ts";
import { PLAIN_TASK } from "./support/tasks.ts";

const CHUNK = 128 * 1024;
const SHA = "b".repeat(64);
const SIZE = 3 * PART + 5;
const URL_THERE = `https://cdn.example.org/fleet/contents/${SHA}?key=secret`;
const WANTED: Wanted = { sha256: SHA, name: "the model", place: `model/${SHA}`, size: SIZE, limit: SIZE, have: 0 };
const TASK: Task = { ...PLAIN_TASK, deadline: 1000 };

function fetching(session: Session, have = 0): Command[] {
  session.connected(0);
  const welcome = { type: "welcome", coordinator: "c", heartbeat: 10, chunk_bytes: 4096 };
  session.received(JSON.stringify(welcome), 0);
  session.received(JSON.stringify(TASK), 0);
  return acts(session.located("t1", [{ ...WANTED, have }], 0));
}

/** What is commanded, without the notes. */
function acts(commands: Command[]): Command[] {
  return commands.filter((one) => one.do !== "note");
}

function ask(offset: number, end: number | null, http = false): Command {
  return { do: "send", message: { type: "fetch", sha256: SHA, offset, end, http, selection: null } };
}

function answer(more: Partial<Content> = {}): string {
  return JSON.stringify({ type: "content", transfer: 3, sha256: SHA, size: SIZE, offset: 0, ...more });
}

describe("parts", () => {
  test("are asked for one after the other", () => {
    const session = new Session("device", 2);
    expect(fetching(session)).toEqual([ask(0, PART)]);
    session.received(answer({ end: PART }), 1);
    let place = 0;
    let last: Command[] = [];
    for (; place < PART; place += CHUNK) last = session.receivedChunk(packChunk(3, place, new Uint8Array(CHUNK)), 1);
    expect(last.map((one) => one.do)).toEqual(["store-chunk", "send"]);
    expect(last[1]).toEqual(ask(PART, 2 * PART));
    // The next part is not beyond the last one's end, which the coordinator does not repeat.
    session.received(answer({ offset: PART, end: 2 * PART }), 1);
    expect(session.work).toMatchObject({ is: "fetching", end: PART });
  });
  test("an earlier coordinator sends all, and is asked once", () => {
    const session = new Session("device", 2);
    fetching(session);
    session.received(answer(), 1);
    const done: string[] = [];
    for (let place = 0; place < SIZE; place += CHUNK) {
      const payload = new Uint8Array(Math.min(CHUNK, SIZE - place));
      done.push(...session.receivedChunk(packChunk(3, place, payload), 1).map((one) => one.do));
    }
    expect(done.filter((one) => one !== "store-chunk")).toEqual(["finish-content"]);
  });
  test("the last part, and a small content, have no end", () => {
    const session = new Session("device", 2);
    expect(fetching(session, SIZE - 5)).toEqual([ask(SIZE - 5, null)]);
  });
});

/** A coordinator on a network without limits: whatever it is asked for arrives at once. */
class Socket {
  static readonly OPEN = 1;
  static sent = 0;
  readyState = 0;
  bufferedAmount = 0;
  onopen: () => void = () => {};
  onmessage: (event: { data: string | ArrayBuffer }) => void = () => {};
  onclose: (event: { code: number; reason: string }) => void = () => {};

  constructor() {
    queueMicrotask(() => {
      this.readyState = 1;
      this.onopen();
    });
  }

  send(frame: string): void {
    const message = JSON.parse(frame);
    if (message.type === "check-in") {
      this.#say({ type: "welcome", coordinator: "c", heartbeat: 10, chunk_bytes: CHUNK });
      this.#say(TASK);
    }
    if (message.type === "fetch")
      queueMicrotask(() => this.#sendPart(message.offset, message.end ?? SIZE, message.end));
  }

  #say(message: object): void {
    queueMicrotask(() => this.onmessage({ data: JSON.stringify(message) }));
  }

  #sendPart(begin: number, last: number, end: number | null): void {
    this.onmessage({ data: answer({ offset: begin, end }) });
    for (let place = begin; place < last; place += CHUNK) {
      const payload = new Uint8Array(Math.min(CHUNK, last - place));
      Socket.sent += payload.length;
      this.onmessage({ data: packChunk(3, place, payload).buffer as ArrayBuffer });
    }
  }

  close(): void {}
}

interface Run {
  driver: Driver;
  session: Session;
  stored: () => number;
  waiting: () => number;
}

/** A device whose store takes a millisecond for each write, and counts what waits for it. */
function slowDevice(hosts: ReadonlySet<string> = new Set()): Run {
  const session = new Session("device", 2, { httpHosts: hosts });
  let stored = 0;
  let most = 0;
  const contents = {
    models: async () => [],
    lastManifest: async () => null,
    lacking: async () => [WANTED],
    append: async (_: Wanted, offset: number, payload: Uint8Array) => {
      expect(offset).toBe(stored);
      most = Math.max(most, Socket.sent - stored);
      await new Promise((resolve) => setTimeout(resolve, 1));
      stored += payload.length;
    },
    finish: () => new Promise(() => {}),
  };
  const driver = new Driver({
    url: "ws://here/",
    timing: { ...TIMING, send: 1 },
    session,
    enrolment: { subprotocols: async () => [], accepted: async () => {} },
    contents,
    outbox: {},
    trainer: { batches: 0 },
    allowed: async () => true,
    changed: () => {},
    state: () => ({}),
    log: () => {},
  } as unknown as ConstructorParameters<typeof Driver>[0]);
  return { driver, session, stored: () => stored, waiting: () => most };
}

async function until(condition: () => boolean): Promise<void> {
  while (!condition()) await new Promise((resolve) => setTimeout(resolve, 5));
}

describe("a slow store", () => {
  beforeEach(() => {
    vi.stubGlobal("WebSocket", Socket);
    Socket.sent = 0;
  });
  afterEach(() => {
    vi.unstubAllGlobals();
  });
  test("bounds what waits in memory", async () => {
    const { driver, session, stored, waiting } = slowDevice();
    const run = driver.run();
    await until(() => stored() === SIZE);
    driver.post(() => session.stop());
    expect(waiting()).toBeLessThanOrEqual(PART);
    expect(waiting()).toBeGreaterThan(PART / 2); // the measure sees what waits
    session.link = { is: "offline" };
    await run;
  });
});

describe("by HTTP", () => {
  let server: Server;
  let give: (range: string) => [number, Record<string, string>, Uint8Array | null];
  const asked: string[] = [];
  const whole = Uint8Array.from({ length: 700_000 }, (_, place) => place % 251);

  beforeEach(async () => {
    asked.length = 0;
    server = createServer((request, response) => {
      const range = request.headers.range ?? "";
      asked.push(range);
      const [status, headers, body] = give(range);
      response.writeHead(status, headers);
      if (body === null) response.write("x");
      else response.end(body);
    });
    await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
    give = (range) => {
      const begin = Number(range.slice("bytes=".length, -1));
      return [206, { "Content-Range": `bytes ${begin}-${whole.length - 1}/${whole.length}` }, whole.subarray(begin)];
    };
  });
  afterEach(() => {
    server.closeAllConnections();
    server.close();
  });

  function url(): string {
    return `http://127.0.0.1:${(server.address() as AddressInfo).port}/contents/${SHA}`;
  }

  async function fetched(begin: number, size = whole.length, patience = 5): Promise<Uint8Array> {
    const parts: Uint8Array[] = [];
    for await (const part of httpParts(url(), begin, size, patience, new AbortController().signal)) parts.push(part);
    return Buffer.concat(parts);
  }

  test("the bytes from one place to the last", async () => {
    for (const begin of [0, 1, 500_000]) {
      expect(Buffer.compare(await fetched(begin), whole.subarray(begin))).toBe(0);
    }
    expect(asked).toEqual(["bytes=0-", "bytes=1-", "bytes=500000-"]);
  });
  test.each([
    ["another status", 404, {}, whole, "answers HTTP 404"],
    ["a redirect", 302, { Location: "http://127.0.0.1/" }, whole, "cannot be read"],
    ["the whole for a part", 200, {}, whole, "answers HTTP 200 to a range"],
    ["another range", 206, { "Content-Range": "bytes 6-9/10" }, whole, "answers with the range"],
    ["too few bytes", 206, {}, whole.subarray(0, 10), "ended the answer at byte 15"],
    ["too many bytes", 206, {}, whole, "sends more than"],
    ["nothing more", 206, {}, null, "sent too little for 0.3 s"],
  ])("%s is not taken", async (_, status, headers, body, why) => {
    give = () => [status, headers as Record<string, string>, body];
    const patience = body === null ? 0.3 : 20;
    await expect(fetched(5, whole.length, patience)).rejects.toThrow(why);
  });
  test("a server that sends a byte now and then does not hold the device up", async () => {
    server.removeAllListeners("request");
    server.on("request", (_, response) => {
      response.writeHead(206);
      const drip = setInterval(() => response.write("x"), 20);
      response.on("close", () => clearInterval(drip));
    });
    await expect(fetched(0, whole.length, 0.5)).rejects.toThrow("sent too little for 0.5 s");
  });
  test("reading waits for the store", async () => {
    const [piece, pieces] = [new Uint8Array(2 ** 16), 2048];
    let written = 0;
    server.removeAllListeners("request");
    server.on("request", async (_, response) => {
      response.writeHead(206);
      for (; written < pieces; written++) {
        if (!response.write(piece)) await new Promise((resolve) => response.once("drain", resolve));
      }
    });
    const parts = httpParts(url(), 0, pieces * piece.length, 5, new AbortController().signal);
    await parts.next();
    for (let before = -1; before !== written; ) {
      before = written;
      await new Promise((resolve) => setTimeout(resolve, 100));
    }
    expect(written).toBeLessThan(pieces / 4); // what sockets hold, and one part
    await parts.return(undefined);
  });
});

describe("a session", () => {
  const HOSTS = new Set(["cdn.example.org"]);
  let session: Session;

  beforeEach(() => {
    session = new Session("device", 2, { httpHosts: HOSTS });
    expect(fetching(session)).toEqual([ask(0, PART, true)]);
  });

  test("fetches where it is told to", () => {
    expect(session.received(answer({ url: URL_THERE }), 1)).toEqual([
      { do: "fetch-by-http", wanted: WANTED, url: URL_THERE, begin: 0, size: SIZE },
    ]);
    expect(acts(session.httpBytes(SHA, 0, new Uint8Array(1000), 2)).map((one) => one.do)).toEqual(["store-chunk"]);
    expect(session.tick(8.5)).toMatchObject([{ message: { type: "heartbeat", fetched: 1000 } }]);
    const rest = acts(session.httpBytes(SHA, 1000, new Uint8Array(SIZE - 1000), 9));
    expect(rest.map((one) => one.do)).toEqual(["store-chunk", "finish-content"]);
    expect(acts(session.stored(SHA, false, 10))).toEqual([ask(0, PART)]); // wrong bytes come by the WebSocket
  });
  test("asks for another URL where bytes came, and goes back to the WebSocket where none did", () => {
    session.received(answer({ url: URL_THERE }), 1);
    session.httpBytes(SHA, 0, new Uint8Array(100_000), 2);
    expect(acts(session.httpEnded(SHA, "HTTP 403", 3))).toEqual([ask(100_000, 100_000 + PART, true)]);
    session.received(answer({ offset: 100_000, url: URL_THERE }), 4);
    const commands = session.httpEnded(SHA, "it is down", 5);
    expect(acts(commands)).toEqual([ask(100_000, 100_000 + PART)]);
    expect(commands[0]).toMatchObject({ do: "note", warning: true });
    expect(JSON.stringify(commands)).not.toContain("secret");
  });
  test.each([
    URL_THERE.replace("cdn", "router"),
    URL_THERE.replace("https", "http"),
    URL_THERE.replace(SHA, "admin"),
    URL_THERE.replace("cdn", "name:password@cdn"),
  ])("does not go to %s", (url) => {
    expect(acts(session.received(answer({ url }), 1))).toEqual([ask(0, PART)]);
  });
  test("stops where its task is cancelled", () => {
    session.received(answer({ url: URL_THERE }), 1);
    const cancel = JSON.stringify({ type: "cancel", task: "t1", code: "round-over", text: "" });
    expect(acts(session.received(cancel, 2))).toEqual([{ do: "stop-http" }]);
    expect(session.httpBytes(SHA, 0, new Uint8Array(5), 3)).toEqual([]);
  });
});

test("the coordinator's own host is one, unless it is this machine", () => {
  expect(httpHosts("wss://Fleet.example:8765/")).toEqual(new Set(["fleet.example"]));
  for (const here of [
    "127.0.0.1",
    "127.1",
    "0.0.0.0",
    "localhost.",
    "[::]",
    "[::ffff:127.0.0.1]",
    "[::ffff:0.0.0.0]",
  ]) {
    expect(httpHosts(`ws://${here}:8765/`)).toEqual(new Set());
  }
  expect(httpHosts("ws://localhost/", ["127.0.0.1", "CDN.example"])).toEqual(new Set(["127.0.0.1", "cdn.example"]));
  expect(() => httpHosts("wss://fleet.example/", ["https://cdn.example"])).toThrow("downloadFrom names https://cdn");
  expect(whyNotFrom(new Set(["127.0.0.1"]), `http://127.0.0.1:80/${SHA}`, SHA)).toBe(null);
});
