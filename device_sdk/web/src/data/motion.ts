/** Windows of the motion sensors. */

import { SourceError } from "./errors.ts";
import type { Example, Tensor } from "./examples.ts";
import { classOf, type Label, type Names } from "./labels.ts";
import { type WindowShape, Windows } from "./windows.ts";

/** `acceleration`: x, y, z with gravity, in m/s^2. `rotation`: alpha, beta, gamma, in degrees a second. */
export type Signal = "acceleration" | "rotation";

export interface MotionOptions extends WindowShape {
  /** How long to record, in seconds. */
  readonly seconds: number;
  /** Three channels of a window each, in this order. Default: both. */
  readonly signals?: readonly Signal[];
  readonly names?: Names;
  /** What the person does meanwhile. Left out: examples have no label. */
  readonly label?: Label;
  /** The classes' names in the model's order, where labels are names. */
  readonly classes?: readonly string[];
}

/** Seconds within which the first sample must come. */
const PATIENCE = 3;

/**
 * Ask the person for the motion sensors: iOS wants that, and only in the handler of a click or a touch. Other browsers do
 * not ask. Only in a page, not in a worker. Rejects with SourceError.
 */
export async function allowMotion(): Promise<void> {
  if (!("DeviceMotionEvent" in globalThis)) {
    throw new SourceError(
      "this page gets no motion sensors: it needs HTTPS, and a browser and a device that have them",
    );
  }
  const kind = DeviceMotionEvent as unknown as { requestPermission?: () => Promise<string> };
  let answer: string | undefined;
  try {
    answer = await kind.requestPermission?.();
  } catch (error) {
    throw new SourceError(`ask for the motion sensors in the handler of a click (${(error as Error).message})`);
  }
  if (answer !== undefined && answer !== "granted") {
    throw new SourceError("the motion sensors were not allowed; they can be, in the browser's settings of this page");
  }
}

/**
 * Yield windows of the motion sensors as they come, for `seconds`: float32 of the shape (3 for each signal, length).
 * A window that a gap interrupts is left out. `allowMotion` comes first. Throws SourceError where no samples come, and
 * DataError where no windows can be made so.
 */
export async function* motionWindows(options: MotionOptions): AsyncGenerator<Example> {
  const {
    seconds,
    signals = ["acceleration", "rotation"],
    names: { input = "x", label: labelName = "y" } = {},
  } = options;
  const windows = new Windows(3 * signals.length, options);
  const found =
    options.label === undefined ? {} : { [labelName]: classOf(options.label, options.classes, "the motion") };
  const ready: Tensor[] = [];
  let problem: SourceError | null = null;
  let began = false;
  let over = false;
  let wake = (): void => {};
  const listen = (event: DeviceMotionEvent): void => {
    const sample = signals.flatMap((signal) => numbersOf(event, signal));
    const lacking = signals.find((_, place) => !Number.isFinite(sample[3 * place]));
    // A device without sensors gives one event with nothing in it.
    if (lacking !== undefined) problem ??= new SourceError(`this device has no sensor for ${lacking}`);
    else ready.push(...windows.push(event.timeStamp / 1000, sample));
    began = true;
    wake();
  };
  const end = (): void => {
    over = true;
    wake();
  };
  const timers = [setTimeout(end, 1000 * seconds)];
  const silent = (): void => {
    if (!began) problem = new SourceError(`no sample of the motion sensors came within ${PATIENCE} s`);
    wake();
  };
  timers.push(setTimeout(silent, 1000 * PATIENCE));
  addEventListener("devicemotion", listen);
  try {
    while (true) {
      for (let next = ready.shift(); next !== undefined; next = ready.shift()) yield { [input]: next, ...found };
      if (problem !== null) throw problem;
      if (over) return;
      await new Promise<void>((resolve) => {
        wake = resolve;
      });
    }
  } finally {
    removeEventListener("devicemotion", listen);
    timers.forEach(clearTimeout);
  }
}

function numbersOf(event: DeviceMotionEvent, signal: Signal): number[] {
  const { accelerationIncludingGravity: a, rotationRate: r } = event;
  const values = signal === "acceleration" ? [a?.x, a?.y, a?.z] : [r?.alpha, r?.beta, r?.gamma];
  return values.map((value) => value ?? Number.NaN);
}
