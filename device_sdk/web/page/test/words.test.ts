import { expect, test } from "vitest";
import { type DeviceState, ProtocolError, StoreError } from "../../src/index.ts";
import { connectionWords, endedWords, phaseWords, runtimeWords, sizeWords, storageWords } from "../shell/words.ts";
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

test("a pause by the person is told apart from one that the device makes", () => {
  const words = (why?: string): string =>
    phaseWords(state({ phase: "paused", ...(why !== undefined && { why }) }), 5).detail;
  expect(words("the device is paused")).toBe(words());
  expect(words("another tab of this device works")).toBe("Another tab of this device works.");
});

test("errors that end the device say what to do", () => {
  expect(endedWords(new ProtocolError("replaced", "x")).what).toBe("Another tab trains for this device.");
  expect(endedWords(new ProtocolError("bad-version", "version 9")).advice).toContain("version 9");
  expect(endedWords(new StoreError("x", true))).toEqual(storageWords(true));
  expect(endedWords(new StoreError("x"))).toEqual(storageWords(false));
  expect(endedWords(new DOMException("x", "QuotaExceededError"))).toEqual(storageWords(true));
  expect(endedWords(new TypeError("no such thing")).advice).toBe("Press Start to try again. (no such thing)");
});

test("a device that cannot connect: offline, refused, or nobody there", () => {
  const words = (online: boolean, seconds: number, hostAnswers: boolean | null): string | undefined =>
    connectionWords({ online, seconds, hostAnswers })?.what;
  expect(words(false, 0, null)).toBe("You are offline.");
  expect(words(true, 5, true)).toBeUndefined();
  expect(words(true, 15, true)).toBe("The coordinator does not let this device in.");
  expect(words(true, 15, false)).toBe("The coordinator cannot be reached.");
  expect(words(true, 15, null)).toBe("The coordinator cannot be reached.");
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
