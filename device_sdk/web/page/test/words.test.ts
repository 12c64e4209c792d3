import { expect, test } from "vitest";
import { type DeviceState, ProtocolError, StoreError } from "../../src/index.ts";
import {
  cannotTellWords,
  connectionWords,
  endedWords,
  keptWords,
  type PhaseWords,
  phaseWords,
  recordsWords,
  runtimeWords,
  sizeWords,
  storageWords,
} from "../shell/words.ts";
import { likeliest, probabilities } from "../train/guess.ts";

const state = (changes: Partial<DeviceState>): DeviceState => ({
  phase: "stopped",
  accepted: 0,
  acceptedBytes: 0,
  ...changes,
});

test("each phase has words, and a round has its number", () => {
  expect(phaseWords(state({}), 0).title).toBe("Draw 5 more digits to begin");
  expect(phaseWords(state({}), 4).title).toBe("Draw 1 more digit to begin");
  expect(phaseWords(state({}), 5).title).toBe("Ready to train");
  expect(phaseWords(state({ phase: "training", round: 3 }), 12)).toMatchObject({
    title: "Training on your 12 drawings",
    detail: "Your device takes part in round 3.",
    mood: "busy",
  });
  const phases = ["connecting", "waiting", "downloading", "uploading"] as const;
  expect(phases.map((phase) => phaseWords(state({ phase }), 5).short)).toEqual([
    "Connecting",
    "Waiting",
    "Fetching",
    "Sending",
  ]);
});

test("a pause by the person is told apart from what the device waits for", () => {
  const words = (why?: string): PhaseWords =>
    phaseWords(state({ phase: "paused", ...(why !== undefined && { why }) }), 5);
  expect(words("the device is paused")).toEqual(words());
  expect(words().title).toBe("Paused");
  expect(words("the device waits until it charges")).toMatchObject({
    title: "Not training now",
    detail: "The device waits until it charges.",
  });
});

test("what the browser cannot tell is said", () => {
  expect(cannotTellWords()).toBe("");
  expect(cannotTellWords(["charging", "network"])).toBe(
    "This browser does not say whether this device charges and what the network costs: the device trains all the same.",
  );
});

test("errors that end the device say what to do", () => {
  expect(endedWords(new ProtocolError("replaced", "x")).what).toBe("Another tab trains for this device.");
  expect(endedWords(new ProtocolError("bad-version", "version 9")).advice).toContain("version 9");
  for (const reason of ["full", "lost", "refused", "failed"] as const) {
    expect(endedWords(new StoreError("x", reason))).toEqual(storageWords(reason));
  }
  expect(recordsWords(new DOMException("x", "QuotaExceededError"))).toEqual(storageWords("full"));
  expect(recordsWords(new DOMException("x", "InvalidStateError"))).toEqual(storageWords("failed"));
  expect(endedWords(new TypeError("no such thing")).advice).toBe("Press Start to try again. (no such thing)");
});

const PLACE = { secure: true, origin: "https://page.example", takesPage: true, invitation: "given" } as const;

test("a device that cannot connect: offline, refused, or nobody there", () => {
  const words = (online: boolean, seconds: number, hostAnswers: boolean | null): string | undefined =>
    connectionWords({ online, seconds, hostAnswers, ...PLACE })?.what;
  expect(words(false, 0, null)).toBe("You are offline.");
  expect(words(true, 5, true)).toBeUndefined();
  expect(words(true, 15, true)).toBe("The coordinator does not let this device in.");
  expect(words(true, 15, false)).toBe("The coordinator cannot be reached.");
  expect(words(true, 15, null)).toBe("The coordinator cannot be reached, or does not let this device in.");
});

test("a refusal names its cause: the invitation is blamed only where it may be the invitation", () => {
  const advice = (place: Partial<Parameters<typeof connectionWords>[0]>): string =>
    Object.values(connectionWords({ online: true, seconds: 15, hostAnswers: true, ...PLACE, ...place })!).join(" ");
  expect(advice({})).toContain("The invitation may be used up");
  expect(advice({})).not.toContain("https://page.example");
  expect(advice({ takesPage: null })).toContain("may also take no devices from pages of https://page.example");
  expect(advice({ takesPage: null, secure: false })).toContain("may also refuse pages that did not come over https");
  expect(advice({ seconds: 0, takesPage: false })).toContain("takes no devices from"); // known at once
  expect(advice({ invitation: "used" })).toContain("Perhaps its operator removed this device");
  expect(advice({ invitation: "none" })).toContain("no invitation: ask for a link");
  expect(advice({ invitation: "not needed" })).not.toContain("nvitation");
  const elsewhere = advice({ takesPage: false });
  expect(elsewhere).toContain("takes no devices from https://page.example");
  expect(elsewhere).toContain("ask the operator to add this one to `origins`");
  const insecure = advice({ takesPage: false, secure: false, origin: "http://fleet.example:8767" });
  expect(insecure).toContain("did not come over https");
  expect(insecure).not.toContain("used up");
});

test("a device that cannot load what trains, or whose last round failed, is in trouble", () => {
  const failed = "what computes could not be loaded: no SIMD.";
  expect(phaseWords(state({ phase: "loading" }), 5)).toMatchObject({ short: "Loading", mood: "idle" });
  expect(phaseWords(state({ phase: "loading", failed }), 5)).toMatchObject({
    title: "This device cannot train now",
    detail: expect.stringContaining("What computes could not be loaded: no SIMD. The page tries again"),
    mood: "trouble",
  });
  expect(phaseWords(state({ phase: "waiting", failed: "out of memory" }), 5)).toMatchObject({
    detail: "The last round did not work on this device: out of memory",
    mood: "trouble",
  });
});

test("what was kept, and how many drawings there are, is said beside the pad", () => {
  expect(keptWords(null, 0)).toBe("0 of 5 drawings.");
  expect(keptWords(7, 3)).toBe("Kept as 7. 3 of 5 drawings.");
  expect(keptWords(1, 5, false)).toBe("Kept as 1. 5 drawings. Enough to start training.");
  expect(keptWords(1, 6, true)).toBe("Kept as 1. 6 drawings.");
});

test("sizes and runtimes for people", () => {
  expect([0, 1023, 2048, 3 * 1024 * 1024].map(sizeWords)).toEqual(["0 B", "1023 B", "2 KiB", "3.0 MiB"]);
  expect(runtimeWords("onnx 1.30.0 web wasm")).toBe("WebAssembly");
  expect(runtimeWords("onnx 1.30.0 web wasm, 4 threads")).toBe("WebAssembly, 4 threads");
  expect(runtimeWords("onnx 1.30.0 web webgpu")).toBe("WebGPU");
  expect(runtimeWords(undefined)).toBe("–");
});

test("a loss under each label gives the probability of each", () => {
  const given = [0.7, 0.2, 0.1];
  const found = probabilities(given.map((probability) => -Math.log(probability)));
  found.forEach((probability, label) => {
    expect(probability).toBeCloseTo(given[label]!, 12);
  });
  expect(probabilities([800, 900, 1000])[0]).toBeCloseTo(1, 12); // no overflow
  expect(likeliest([0.1, 0.5, 0.3, 0.1]).map(({ label }) => label)).toEqual([1, 2, 0]);
});
