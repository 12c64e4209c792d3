/** What the driver does where the network or the clock does something odd, with a WebSocket that the test plays. */

import { afterEach, beforeEach, describe, expect, test, vi } from "vitest";
import { Driver } from "../src/driver/driver.ts";
import { TIMING } from "../src/driver/timing.ts";
import { Device, type DeviceOptions, type DeviceState, MemoryStore } from "../src/index.ts";
import { crc32 } from "../src/protocol/crc32.ts";
import type { Report, Task } from "../src/protocol/messages.ts";
import { startWasm } from "../src/runtimes/wasm.ts";
import { Session } from "../src/session/session.ts";
import { Outbox } from "../src/storage/outbox.ts";
import { vectors } from "./support/vectors.ts";

vi.mock("../src/runtimes/wasm.ts", () => ({ startWasm: vi.fn() }));

/** A coordinator that welcomes a device, and then says nothing. */
class Socket {
  static made: Socket[] = [];
  static readonly OPEN = 1;
  static reachable = true;
  readyState = 0;
  bufferedAmount = 0;
  readonly sent: { type: string; [field: string]: unknown }[] = [];
  onopen: () => void = () => {};
  onmessage: (event: { data: string }) => void = () => {};
  onclose: (event: { code: number; reason: string }) => void = () => {};

  constructor() {
    Socket.made.push(this);
    const { reachable } = Socket;
    queueMicrotask(() => {
      this.readyState = reachable ? 1 : 3;
      if (reachable) this.onopen();
      else this.onclose({ code: 1006, reason: "" });
    });
  }

  send(frame: string): void {
    const message = JSON.parse(frame);
    this.sent.push(message);
    if (message.type === "check-in") this.say({ type: "welcome", coordinator: "c", heartbeat: 10, chunk_bytes: 4096 });
  }

  say(message: object): void {
    queueMicrotask(() => this.onmessage({ data: JSON.stringify(message) }));
  }

  close(): void {
    if (this.readyState === 3) return;
    this.readyState = 3;
    queueMicrotask(() => this.onclose({ code: 1000, reason: "" }));
  }
}

const states: DeviceState[] = [];
let device: Device;
let store: MemoryStore;
let network: EventTarget;
let served: Promise<void>;

beforeEach(() => {
  vi.useFakeTimers({ toFake: ["setTimeout", "clearTimeout", "performance", "Date"] });
  vi.spyOn(Math, "random").mockReturnValue(0.5);
  vi.stubGlobal("WebSocket", Socket);
  network = new EventTarget();
  vi.stubGlobal("addEventListener", network.addEventListener.bind(network));
  vi.stubGlobal("removeEventListener", network.removeEventListener.bind(network));
  vi.stubGlobal("navigator", { onLine: true });
  Socket.made = [];
  Socket.reachable = true;
  states.length = 0;
  store = new MemoryStore();
  vi.mocked(startWasm).mockReset().mockResolvedValue(ENGINE);
  device = make();
});

const ENGINE = { name: "wasm", close: () => {} } as Awaited<ReturnType<typeof startWasm>>;

function make(more: Partial<DeviceOptions> = {}): Device {
  const x = { values: new Float32Array(2), shape: [2] };
  return new Device({ url: "ws://here/", data: { x }, store, onChange: (state) => states.push(state), ...more });
}

afterEach(async () => {
  device.stop();
  await pass(10);
  await served;
  vi.useRealTimers();
  vi.restoreAllMocks();
  vi.unstubAllGlobals();
});

async function pass(seconds: number): Promise<void> {
  await vi.advanceTimersByTimeAsync(1000 * seconds);
}

/** Serve until the device is welcomed. */
async function begin(): Promise<void> {
  served = device.serve();
  await pass(0.1);
  expect(states.at(-1)?.phase).toBe(Socket.reachable ? "waiting" : "connecting");
}

describe("the clock", () => {
  test("that runs on while the monotonic one stands still: the device slept, and connects again", async () => {
    await begin();
    vi.setSystemTime(Date.now() + 60_000);
    await pass(10);
    expect(Socket.made.length).toBe(2);
    expect(states.find((state) => state.phase === "connecting" && state.why)?.why).toContain("was suspended for 60 s");
    expect(states.at(-1)?.phase).toBe("waiting");
  });
  test.each([20_000, -86_400_000])("that is set by %i ms changes nothing", async (milliseconds) => {
    await begin();
    vi.setSystemTime(Date.now() + milliseconds);
    await pass(30);
    expect(Socket.made.length).toBe(1);
    expect(Socket.made[0]!.sent.filter((message) => message.type === "heartbeat").length).toBe(3);
  });
});

describe("the network", () => {
  test("is tried seldom while the browser says that there is none, and at once when it is back", async () => {
    vi.stubGlobal("navigator", { onLine: false });
    Socket.reachable = false;
    await begin();
    await pass(119);
    expect(Socket.made.length).toBe(4); // half of the longest wait, each time
    expect(states.at(-1)).toMatchObject({ phase: "connecting", why: "there is no network" });
    vi.stubGlobal("navigator", { onLine: true });
    Socket.reachable = true;
    network.dispatchEvent(new Event("online"));
    await pass(0.5);
    expect(states.at(-1)?.phase).toBe("waiting");
  });
  test("that is another one leaves the connection", async () => {
    await begin();
    network.dispatchEvent(new Event("online"));
    await pass(0.5);
    expect(Socket.made.map((socket) => socket.readyState)).toEqual([3, 1]);
  });
  test("does not bring a device back before the time that the coordinator named", async () => {
    await begin();
    Socket.made[0]!.say({ type: "come-back", after: 100, reason: "no-task" });
    await pass(1);
    expect(states.at(-1)?.phase).toBe("waiting");
    network.dispatchEvent(new Event("online"));
    await pass(90);
    expect(Socket.made.length).toBe(1);
    await pass(20);
    expect(Socket.made.length).toBe(2);
  });
  test("that lost the connection unseen is noticed within two minutes", async () => {
    const sha256 = "ab".repeat(32);
    await store.write({
      bundles: new TextEncoder().encode(JSON.stringify([sha256])),
      [`file/${sha256}`]: new Uint8Array(7),
    });
    await begin();
    await pass(61);
    expect(Socket.made[0]!.sent.at(-1)).toMatchObject({ type: "fetch", sha256, offset: 7 });
    await pass(61);
    expect(Socket.made.length).toBe(2);
  });
});

test("a coordinator that was never reached: what is shown says what it may be", async () => {
  Socket.reachable = false;
  await begin();
  expect(states.at(-1)?.why).toContain("needs a token");
});

test("a device that is paused serves when it is resumed", async () => {
  await begin();
  device.pause();
  await pass(1);
  expect(states.at(-1)).toMatchObject({ phase: "paused", why: "the device is paused" });
  expect(Socket.made[0]!.readyState).toBe(3);
  device.resume();
  await pass(1);
  expect(states.at(-1)?.phase).toBe("waiting");
});

describe("what computes", () => {
  test("that cannot be loaded: no task is taken, it is said, and it is tried again", async () => {
    vi.mocked(startWasm).mockRejectedValue(new Error("no SIMD here"));
    served = device.serve();
    await pass(100);
    expect(Socket.made).toEqual([]);
    expect(states.at(-1)).toMatchObject({
      phase: "loading",
      failed: "what computes could not be loaded: no SIMD here",
    });
    vi.mocked(startWasm).mockResolvedValue(ENGINE);
    await pass(60);
    expect(states.at(-1)?.phase).toBe("waiting");
    expect(states.at(-1)?.failed).toBeUndefined();
    expect(Socket.made.length).toBe(1);
  });
  test("that loads for long is waited for, and a pause and a stop are heard meanwhile", async () => {
    vi.mocked(startWasm).mockReturnValue(new Promise(() => {}));
    served = device.serve();
    await pass(1);
    expect(states.at(-1)?.phase).toBe("loading");
    device.pause();
    await pass(1);
    expect(states.at(-1)?.phase).toBe("paused");
    device.resume();
    await pass(1);
    expect(states.at(-1)?.phase).toBe("loading");
    device.stop();
    await served;
    expect(states.at(-1)?.phase).toBe("stopped");
    expect(startWasm).toHaveBeenCalledTimes(1);
  });
});

/** Leave a finished update in the store, as a device does whose tab is closed. */
async function leaveUpdate(): Promise<void> {
  const content = new Uint8Array(8);
  const part = { name: "update", encoding: "float32", size: 8, crc32: crc32(content) };
  const numbers = { examples: 2, steps: 1, epochs: 1, complete: true, loss: 0.5, metrics: {}, seconds: 1 };
  const report = {
    ...numbers,
    type: "report",
    task: "t1",
    round: 1,
    parts: [part],
    evaluation: null,
    personal: null,
    lost_tied: false,
    clipped: null,
    sealed: null,
    signature: null,
  };
  const bundle = "ab".repeat(32);
  const kept = { keptState: new Float32Array(0), tied: {}, personal: null };
  await new Outbox(store).save({ result: report as Report, contents: [content], bundle, ...kept });
}

describe("consent", () => {
  let given: boolean;
  const sent = (): string[] => Socket.made.flatMap((socket) => socket.sent.map((message) => message.type));

  test("that was withdrawn before the device connects: it is paused until it is resumed", async () => {
    given = false;
    device = make({ consent: async () => given });
    served = device.serve();
    await pass(1);
    expect(states.at(-1)).toMatchObject({ phase: "paused", why: "the page withdrew its consent" });
    expect(Socket.made).toEqual([]);
    given = true;
    device.resume();
    await pass(1);
    expect(states.at(-1)?.phase).toBe("waiting");
  });
  test.each([true, false])("decides whether a finished update is sent: %s", async (then) => {
    await leaveUpdate();
    const answers = [true, then]; // at the connection, and before the report
    device = make({ consent: () => answers.shift() ?? then });
    served = device.serve();
    await pass(1);
    expect(sent()).toEqual(then ? ["check-in", "report"] : ["check-in"]);
    expect(states.at(-1)?.phase).toBe(then ? "uploading" : "paused");
    expect(await new Outbox(store).load()).toMatchObject({ task: "t1" }); // it is sent after `resume`
  });
  test("that was withdrawn while what a task needs arrived: it is given back untrained", async () => {
    const session = new Session("device", 2);
    let stop = (): void => {};
    const train = vi.fn();
    const driver = new Driver({
      url: "ws://here/",
      timing: TIMING,
      session,
      enrolment: { subprotocols: async () => [], accepted: async () => {} },
      contents: { models: async () => [], lastManifest: async () => null, lacking: async () => [] },
      outbox: new Outbox(store),
      trainer: { train, batches: 0 },
      verify: async () => false,
      saveTrusted: async () => {},
      allowed: async () => {
        if (session.work.is !== "training") return true;
        stop();
        return false;
      },
      changed: () => {},
      state: () => ({}),
      log: () => {},
    } as unknown as ConstructorParameters<typeof Driver>[0]);
    stop = () => driver.post(() => session.stop());
    served = driver.run();
    await pass(1);
    const vector = { name: "model", sha256: "cd".repeat(32), size: 8, encoding: "float32", delta: null };
    const training = { hyper: {}, epochs: 1, batch_size: 0, seed: 1, parts: { update: "float32" } };
    const task = { type: "task", task: "t1", round: 1, version: 0, bundle: "ab".repeat(32), vectors: [vector] };
    Socket.made[0]!.say({ ...task, ...training, deadline: 100, time_budget: null });
    await pass(1);
    await served;
    expect(train).not.toHaveBeenCalled();
    expect(Socket.made[0]!.sent.at(-1)).toMatchObject({ type: "failed", task: "t1", code: "stopping" });
  });
  test("an update that the owner wants discarded is not sent", async () => {
    await leaveUpdate();
    device = make({ discardUpdate: true });
    served = device.serve();
    await pass(1);
    expect(sent()).toEqual(["check-in"]);
    expect(await store.keys("pending/")).toEqual([]);
  });
});

test("an erased device has stopped, and left nothing", async () => {
  await begin();
  expect(await store.keys("")).not.toEqual([]);
  const erased = device.erase();
  await pass(1);
  await erased;
  expect(states.at(-1)).toMatchObject({ phase: "stopped", why: "the device was stopped" });
  expect(await store.keys("")).toEqual([]);
});

test("a device is not made with demands of its owner that make no sense", () => {
  expect(() => make({ secure: { minimum: 1 } })).toThrow("secure.minimum is 1; expected 2 to 65537");
  expect(() => make({ secure: { helper: "cd".repeat(32), minimum: 20, require: true } })).not.toThrow();
});

describe("an update that is not masked yet", () => {
  const { task } = vectors("secure.json").training[0];
  const given: Task = { ...task, vectors: task.vectors, secure: { ...task.secure, noise: null } };
  const content = new Uint8Array(Float32Array.of(0.1, -0.2).buffer);
  type Sent = { readonly type: string; readonly sealed?: string };

  /** Leave it in the store, as a device does whose tab is closed, and serve until the device has asked about it. */
  async function ask(): Promise<Socket> {
    const kept = { keptState: new Float32Array(0), tied: {}, personal: null };
    await new Outbox(store).save({ result: given, contents: [content], share: 0.5, bundle: given.bundle, ...kept });
    served = device.serve();
    await vi.waitFor(() => expect(types()).toContain("finished"));
    return Socket.made.at(-1)!;
  }
  const types = (): string[] => Socket.made.at(-1)!.sent.map(({ type }) => type);
  const reports = (): Sent[] => Socket.made.flatMap(({ sent }) => sent.filter(({ type }) => type === "report"));

  test("is masked when its factor is known, and the masked one is in the store before it is reported", async () => {
    const socket = await ask();
    const saved: string[] = [];
    const write = vi.spyOn(store, "write");
    vi.spyOn(socket, "send").mockImplementation((frame) => {
      if (JSON.parse(frame).type === "report") saved.push(...Object.keys(write.mock.calls.at(-1)![0]));
      socket.sent.push(JSON.parse(frame));
    });
    socket.say({ type: "weighing", task: given.task, factor: 0.5 });
    await vi.waitFor(() => expect(types()).toContain("report"));
    expect(saved).toContain("pending/parts");
    expect(reports()[0]!.sealed).toMatch(/^[0-9a-f]{160}$/);
  });

  test("is masked once: a device that is stopped meanwhile reports the same update at its next start", async () => {
    const socket = await ask();
    socket.say({ type: "weighing", task: given.task, factor: 0.5 });
    await vi.waitFor(() => expect(types()).toContain("report"));
    device.stop();
    await pass(10);
    await served;
    device = make();
    served = device.serve();
    await vi.waitFor(() => expect(reports()).toHaveLength(2));
    expect(reports()[1]).toEqual(reports()[0]);
    expect(types()).toEqual(["check-in", "report"]);
  });

  test("that is cancelled while it is masked is gone, and the device goes on", async () => {
    const socket = await ask();
    socket.say({ type: "weighing", task: given.task, factor: 0.5 });
    socket.say({ type: "cancel", task: given.task, code: "round-over" });
    await vi.waitFor(async () => {
      expect(states.at(-1)?.phase).toBe("waiting");
      expect(await store.keys("pending/")).toEqual([]);
    });
    await pass(1);
    expect(reports()).toEqual([]);
    expect([Socket.made.length, states.at(-1)?.phase]).toEqual([1, "waiting"]);
  });

  test("ends with its task where it cannot be masked", async () => {
    const socket = await ask();
    vi.spyOn(crypto, "getRandomValues").mockImplementation(() => {
      throw new Error("no randomness");
    });
    socket.say({ type: "weighing", task: given.task, factor: 0.5 });
    await vi.waitFor(() => expect(types()).toContain("failed"));
    expect(socket.sent.at(-1)).toMatchObject({
      type: "failed",
      code: "runtime-error",
      text: expect.stringContaining("not told"),
    });
    expect(await store.keys("pending/")).toEqual([]);
  });
});
