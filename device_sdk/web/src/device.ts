/** The class that a page uses to serve a coordinator with its own data. */

import { collectExamples, type Examples, isExamples } from "./data/examples.ts";
import { Driver, type Log } from "./driver/driver.ts";
import { findVerifier } from "./driver/signatures.ts";
import { TIMING, type Timing } from "./driver/timing.ts";
import type { DeviceState } from "./life/state.ts";
import { lastChosen, type RuntimeOptions, runtimeName } from "./runtimes/choose.ts";
import { isEngineName } from "./runtimes/engine.ts";
import { Session, type Statement } from "./session/session.ts";
import { Contents } from "./storage/contents.ts";
import { Enrolment, readOrMakeName, readToken } from "./storage/identity.ts";
import { Outbox } from "./storage/outbox.ts";
import type { Store } from "./storage/store.ts";
import { checkedKeys, trustFirst, writeTrustedKeys } from "./storage/trusted_keys.ts";
import { ALGORITHMS } from "./training/algorithms.ts";
import { type Columns, examplesOf } from "./training/data.ts";
import { Trainer } from "./training/trainer.ts";

const SOFTWARE = "fleetlearn-web 0.1.0";
/** Milliseconds between two changes that tell of a training's progress alone. */
const PROGRESS = 100;

/** What a device may state at a check-in. What is left out is not known. */
export type Stated = Pick<Statement, "tags" | "tier" | "charging" | "network" | "memory">;

export interface DeviceOptions extends RuntimeOptions {
  /** `ws://` or `wss://` address of the coordinator. */
  readonly url: string;
  /** The device's data, by the names of the bundle's batch arrays; or an iterator of examples, which `serve` first
   * collects in memory (at most 128 MiB). */
  readonly data: Columns | Examples;
  /** What outlives the page: `await openIndexedDb()`. One device, one store. */
  readonly store: Store;
  /** The device's name at its first start. Left out: a random name. */
  readonly name?: string;
  /** Enrols the device with a coordinator that asks for credentials, and may bring keys to trust. Needed once. */
  readonly token?: string;
  /** The coordinator's public keys: the device then does only tasks that one of them signed, at later starts too. Left
   * out: the keys that the token brings, or that are in the store. */
  readonly keys?: readonly string[];
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
  readonly #token: string | undefined;
  readonly #keys: readonly string[];
  /** The examples of an iterator, once `serve` has begun to collect them. */
  #collected: Promise<Columns> | null = null;
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

  /** Throws DataError where the arrays have no examples, and RangeError on a url, a token or a key that cannot be one. */
  constructor(options: DeviceOptions) {
    const { protocol } = new URL(options.url);
    if (protocol !== "ws:" && protocol !== "wss:") {
      throw new RangeError(`${options.url} was given; expected ws://HOST:PORT or wss://HOST:PORT`);
    }
    const token = options.token === undefined ? undefined : readToken(options.token);
    this.#token = token?.secret;
    this.#keys = checkedKeys(options.keys?.length ? options.keys : (token?.keys ?? []));
    if (options.runtime !== undefined && !isEngineName(options.runtime)) {
      throw new RangeError(`the runtime ${options.runtime} was given; expected wasm, webgpu, or wasm, N threads`);
    }
    if (!isExamples(options.data)) examplesOf(options.data);
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
   * Rejects with StoreError (the store is full, or lost), DataError (the data do not fit the bundle, or are too many),
   * ProtocolError (the coordinator refuses the check-in; `replaced`: another tab or process speaks for the same device;
   * `bad-version` too: the device has keys, and signatures cannot be checked here).
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

  async #columns(): Promise<Columns> {
    const { data } = this.#options;
    if (!isExamples(data)) return data;
    this.#collected ??= collectExamples(data);
    return this.#collected;
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
    const { url, store, name, timing, state, log = () => {} } = this.#options;
    const data = await this.#columns();
    const device = await readOrMakeName(store, name);
    let trusted = await trustFirst(store, this.#keys, (text) => log(text, "warning"));
    const verify = trusted.length > 0 ? await findVerifier() : async () => false;
    const contents = new Contents(store);
    const outbox = new Outbox(store);
    const enrolment = new Enrolment(store, device, this.#token);
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
      const session = await this.#begin(device, examplesOf(data), trusted, outbox);
      this.#driver = new Driver({
        url,
        timing: { ...TIMING, ...timing },
        session,
        enrolment,
        contents,
        outbox,
        trainer,
        verify,
        saveTrusted: async (keys) => {
          await writeTrustedKeys(store, keys);
          trusted = keys; // for the run after a pause: a store that was evicted must not make the device trust everybody
        },
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
  async #begin(device: string, examples: number, trusted: readonly string[], outbox: Outbox): Promise<Session> {
    const { untilFinished = false } = this.#options;
    this.#session = new Session(device, examples, {
      software: SOFTWARE,
      algorithms: Object.keys(ALGORITHMS).filter((algorithm) => algorithm !== "plain"),
      held: await outbox.load(),
      trusted,
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
