/** The class that a page uses to serve a coordinator with its own data. */

import { Driver, type Log } from "./driver/driver.ts";
import { TIMING, type Timing } from "./driver/timing.ts";
import type { DeviceState } from "./life/state.ts";
import { lastChosen, type RuntimeOptions, runtimeName } from "./runtimes/choose.ts";
import { isEngineName } from "./runtimes/engine.ts";
import { Session, type Statement } from "./session/session.ts";
import { Contents } from "./storage/contents.ts";
import { Enrolment, readOrMakeName } from "./storage/identity.ts";
import { Outbox } from "./storage/outbox.ts";
import type { Store } from "./storage/store.ts";
import { ALGORITHMS } from "./training/algorithms.ts";
import { type Columns, examplesOf } from "./training/data.ts";
import { Trainer } from "./training/trainer.ts";

const SOFTWARE = "fleetlearn-web 0.1.0";
const TOKEN = /^[A-Za-z0-9_-]{43,128}$/;
/** Milliseconds between two changes that tell of a training's progress alone. */
const PROGRESS = 100;

/** What a device may state at a check-in. What is left out is not known. */
export type Stated = Pick<Statement, "tags" | "tier" | "charging" | "network" | "memory">;

export interface DeviceOptions extends RuntimeOptions {
  /** `ws://` or `wss://` address of the coordinator. */
  readonly url: string;
  /** The device's data, by the names of the bundle's batch arrays. */
  readonly data: Columns;
  /** What outlives the page: `await openIndexedDb()`. One device, one store. */
  readonly store: Store;
  /** The device's name at its first start. Left out: a random name. */
  readonly name?: string;
  /** Enrols the device with a coordinator that asks for credentials. Needed once. */
  readonly token?: string;
  /** What the device states at each check-in, such as `charging`. */
  readonly state?: () => Stated | Promise<Stated>;
  /** End when the coordinator says that the training is finished. */
  readonly untilFinished?: boolean;
  readonly timing?: Partial<Timing>;
  readonly log?: Log;
  /** Called when what the device does has changed; during training at most ten times a second. */
  readonly onChange?: (state: DeviceState) => void;
}

/** A device that serves a coordinator with its own data. */
export class Device {
  readonly #options: DeviceOptions;
  #driver: Driver | null = null;
  #session: Session | null = null;
  #trainer: Trainer | null = null;
  #serving: Promise<void> | null = null;
  #stopped = false;
  #paused = false;
  #wake: () => void = () => {};
  #accepted = 0;
  #acceptedBytes = 0;
  /** Why `serve` ended. */
  #ended = "";
  #shown: DeviceState | null = null;
  #shownAt = 0;

  /** Throws DataError where the arrays have no examples, and RangeError on a url or a token that cannot be one. */
  constructor(options: DeviceOptions) {
    const { protocol } = new URL(options.url);
    if (protocol !== "ws:" && protocol !== "wss:") {
      throw new RangeError(`${options.url} was given; expected ws://HOST:PORT or wss://HOST:PORT`);
    }
    if (options.token !== undefined && !TOKEN.test(options.token)) {
      throw new RangeError(
        `the token has ${options.token.length} characters; expected 43 to 128 letters, digits, - and _`,
      );
    }
    if (options.runtime !== undefined && !isEngineName(options.runtime)) {
      throw new RangeError(`the runtime ${options.runtime} was given; expected wasm, webgpu, or wasm, N threads`);
    }
    examplesOf(options.data);
    this.#options = options;
  }

  /** What the device does now. */
  get state(): DeviceState {
    const known = {
      accepted: this.#accepted + (this.#session?.accepted ?? 0),
      acceptedBytes: this.#acceptedBytes + (this.#session?.acceptedBytes ?? 0),
      runtime: runtimeName(this.#trainer?.engine ?? "wasm"),
    };
    if (this.#serving === null) return { phase: "stopped", ...known, ...(this.#ended !== "" && { why: this.#ended }) };
    if (this.#paused && this.#driver === null) return { phase: "paused", ...known, why: "the device is paused" };
    const activity = this.#driver?.activity ?? { phase: "connecting" };
    const progress = activity.phase === "training" ? this.#trainer?.progress : null;
    return { ...activity, ...progress, ...known };
  }

  /**
   * Serve until `stop`, or until the training is finished (`untilFinished`).
   *
   * Rejects with StoreError (the store is full, or lost), DataError (the data do not fit the bundle), ProtocolError (the
   * coordinator refuses the check-in; `replaced`: another tab or process speaks for the same device).
   */
  async serve(): Promise<void> {
    if (this.#serving !== null) throw new Error("the device serves already");
    this.#serving = this.#serve();
    this.#show();
    try {
      await this.#serving;
      this.#ended = this.#session?.finished === true ? "the training is finished" : "the device was stopped";
    } catch (error) {
      this.#ended = (error as Error).message;
      throw error;
    } finally {
      this.#settle();
      this.#serving = null;
      this.#stopped = false;
      this.#show();
    }
  }

  /** End `serve` soon. A task under way is given back; a finished update stays in the store for the next start. */
  stop(): void {
    this.#stopped = true;
    this.#interrupt();
  }

  /** Give a task under way back and disconnect, until `resume`. `serve` goes on. */
  pause(): void {
    this.#paused = true;
    this.#interrupt();
  }

  resume(): void {
    this.#paused = false;
    this.#wake();
  }

  /** Stop, and delete all that the store has: name, credential, downloads, a finished update, what was kept. */
  async erase(): Promise<void> {
    this.stop();
    await this.#serving?.catch(() => {}); // `serve` rejects with it
    this.#stopped = false;
    const { store } = this.#options;
    const keys = await store.keys("");
    if (keys.length > 0) await store.write(Object.fromEntries(keys.map((key) => [key, null])));
  }

  async #serve(): Promise<void> {
    const { url, data, store, name, token, timing, state, log = () => {} } = this.#options;
    const device = await readOrMakeName(store, name);
    const contents = new Contents(store);
    const outbox = new Outbox(store);
    const enrolment = new Enrolment(store, device, token);
    const trainer = new Trainer(contents, outbox, data, { ...this.#options, log });
    trainer.engine = this.#options.runtime ?? (await lastChosen(store));
    const changed = (): void => this.#show();
    trainer.onProgress = changed;
    this.#trainer = trainer;
    while (!this.#stopped) {
      this.#show();
      if (this.#paused) {
        await new Promise<void>((resolve) => {
          this.#wake = resolve;
        });
        continue;
      }
      const session = await this.#begin(device, outbox);
      this.#driver = new Driver({
        url,
        timing: { ...TIMING, ...timing },
        session,
        enrolment,
        contents,
        outbox,
        trainer,
        state: async () => ({ ...(await state?.()), runtime: runtimeName(trainer.engine) }),
        changed,
        log,
      });
      if (this.#stopped || this.#paused) this.#interrupt();
      await this.#driver.run();
      if (session.finished) return;
      this.#settle();
    }
  }

  /** Make the session of the next run. */
  async #begin(device: string, outbox: Outbox): Promise<Session> {
    const { data, untilFinished = false } = this.#options;
    this.#session = new Session(device, examplesOf(data), {
      software: SOFTWARE,
      algorithms: Object.keys(ALGORITHMS).filter((algorithm) => algorithm !== "plain"),
      held: await outbox.load(),
      untilFinished,
    });
    return this.#session;
  }

  /** Keep of a run that has ended what it counted. */
  #settle(): void {
    this.#driver = null;
    this.#accepted += this.#session?.accepted ?? 0;
    this.#acceptedBytes += this.#session?.acceptedBytes ?? 0;
    this.#session = null;
  }

  /** End the run of the driver. */
  #interrupt(): void {
    const session = this.#session;
    if (session !== null) this.#driver?.post(() => session.stop());
    this.#wake();
  }

  /** Tell the page what changed. */
  #show(): void {
    const { onChange } = this.#options;
    if (onChange === undefined) return;
    const state = this.state;
    const before = this.#shown;
    if (before !== null && sameText(state, before)) return;
    const progressAlone = before !== null && sameText({ ...state, ...NO_PROGRESS }, { ...before, ...NO_PROGRESS });
    if (progressAlone && performance.now() < this.#shownAt + PROGRESS) return;
    this.#shown = state;
    this.#shownAt = performance.now();
    onChange(state);
  }
}

const NO_PROGRESS = { step: 0, steps: 0, loss: 0 };

function sameText(one: DeviceState, other: DeviceState): boolean {
  return JSON.stringify(one) === JSON.stringify(other);
}
