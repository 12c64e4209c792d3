/** The class that a page uses to serve a coordinator with its own data. */

import { collectExamples, type Examples, isExamples } from "./data/examples.ts";
import { Driver, type Log } from "./driver/driver.ts";
import { findVerifier } from "./driver/signatures.ts";
import { secondsToWait, TIMING, type Timing } from "./driver/timing.ts";
import { onNetwork } from "./life/network.ts";
import type { DeviceState } from "./life/state.ts";
import { type Conditions, checkConditions, UNKNOWN, watchSurroundings } from "./life/surroundings.ts";
import { lastChosen, type RuntimeOptions, runtimeName } from "./runtimes/choose.ts";
import { isEngineName } from "./runtimes/engine.ts";
import { httpHosts } from "./session/http_sources.ts";
import { checkSecureDemands, type SecureDemands } from "./session/secure_tasks.ts";
import { Session, type Statement } from "./session/session.ts";
import { Contents } from "./storage/contents.ts";
import type { StoreError } from "./storage/errors.ts";
import { Enrolment, readOrMakeName, readToken } from "./storage/identity.ts";
import { Outbox } from "./storage/outbox.ts";
import { eraseStore, type Store } from "./storage/store.ts";
import { checkedKeys, trustFirst, writeTrustedKeys } from "./storage/trusted_keys.ts";
import { ALGORITHMS } from "./training/algorithms.ts";
import { type Columns, examplesOf } from "./training/data.ts";
import { Masker } from "./training/masker.ts";
import { ANSWERS, Trainer } from "./training/trainer.ts";

const SOFTWARE = "fleetlearn-web 0.2.0";
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
  /** What the device's owner demands of secure aggregation, whatever the coordinator says. */
  readonly secure?: SecureDemands;
  /** Serve only while these hold, where the browser can tell; `DeviceState.cannotTell` says where it cannot. */
  readonly only?: Conditions;
  /** Whether the person still wants this. Asked before the device connects, before it begins to compute and before it sends
   * a result: a tab that was frozen may not have heard that another tab was told to pause. Where the answer is false the
   * device gives its task back and is `paused`, until `resume`. */
  readonly consent?: () => boolean | Promise<boolean>;
  /** Delete a finished update that an earlier device of this store left, in place of sending it: for example because
   * some of its examples were deleted since. */
  readonly discardUpdate?: boolean;
  /** Fetch the model that predicts with each bundle, once, so that `openSharedModel` can `predict`. */
  readonly predicts?: boolean;
  /** What says whether the device charges and what its network is. Left out: the browser. */
  readonly watch?: typeof watchSurroundings;
  /** What the device states at each check-in, beside that. */
  readonly state?: () => Stated | Promise<Stated>;
  /** Hosts from which models and bundles are fetched by HTTP where the coordinator names one, such as "cdn.example.org".
   * The coordinator's own host is one, unless that is this machine. */
  readonly downloadFrom?: readonly string[];
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
  /** `consent` said no. */
  #refused = false;
  /** What computes is being loaded, or waits to be loaded again. */
  #loading = false;
  /** Why what computes could not be loaded, and how often in a row. */
  #loadError: string | null = null;
  #loadFailures = 0;
  /** Why the last task of the runs that ended failed. */
  #failed: string | null = null;
  #surroundings = UNKNOWN;
  /** Another tab has the store. */
  #waitsForTab = false;
  /** Ends the waiting for the store. */
  #waiting = new AbortController();
  #lost: StoreError | null = null;
  #wake: () => void = () => {};
  #accepted = 0;
  #acceptedBytes = 0;
  /** Why `serve` ended. */
  #ended = "";
  #shown: DeviceState | null = null;
  #shownAt = 0;

  /** Throws DataError where the arrays have no examples, and RangeError on a url, a token, a key or a demand that cannot be
   * one. */
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
    checkSecureDemands(options.secure ?? {});
    httpHosts(options.url, options.downloadFrom); // fails here rather than in the first task
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
    const { cannotTell } = this.#conditions;
    const failed = this.#loadError ?? (this.#session === null ? this.#failed : this.#session.failed);
    const common = { ...known, ...(cannotTell.length > 0 && { cannotTell }), ...(failed !== null && { failed }) };
    const why = this.#whyPaused;
    if (why !== null && this.#driver === null) return { phase: "paused", ...common, why };
    if (this.#loading) return { phase: "loading", ...common };
    const activity = this.#driver?.activity ?? { phase: "connecting" };
    const progress = activity.phase === "training" ? this.#trainer?.progress : null;
    return { ...activity, ...progress, ...common };
  }

  get #conditions(): ReturnType<typeof checkConditions> {
    return checkConditions(this.#options.only ?? {}, this.#surroundings);
  }

  /** Why the device must not serve now. */
  get #whyPaused(): string | null {
    if (this.#paused) return "the device is paused";
    if (this.#refused) return "the page withdrew its consent";
    return this.#waitsForTab ? "another tab or window serves as this device" : this.#conditions.why;
  }

  /**
   * Serve until `stop`, or until the training is finished (`untilFinished`).
   *
   * While another tab serves from the same store, this one waits, and goes on where that one ends or dies. Rejects with
   * StoreError (`reason`: the store is full, or lost), DataError (the data do not fit the bundle, or are too many),
   * ProtocolError (the coordinator refuses the check-in; `replaced`: another process speaks for the same device;
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
    this.#waiting.abort();
    this.#interrupt();
  }

  /** Give a task under way back and disconnect, until `resume`. `serve` goes on. */
  pause(): void {
    this.#paused = true;
    this.#interrupt();
    this.#show(); // no run ends here while another tab has the store
  }

  resume(): void {
    this.#paused = this.#refused = false;
    this.#wake();
    this.#show();
  }

  /** Stop, also in another tab, and delete all that the store has: name, credential, downloads, a finished update, what
   * was kept. */
  async erase(): Promise<void> {
    this.stop();
    await this.#serving?.catch(() => {}); // `serve` rejects with it
    this.#stopped = false;
    await eraseStore(this.#options.store);
  }

  async #serve(): Promise<void> {
    const { store, watch = watchSurroundings } = this.#options;
    this.#lost = null;
    const unwatch = watch((surroundings) => {
      this.#surroundings = surroundings;
      if (this.#whyPaused === null) this.#wake();
      else this.#interrupt();
      this.#show();
    });
    let release: (() => void) | undefined;
    try {
      release = await this.#claim();
      if (!this.#stopped) await this.#serveFrom(store);
    } finally {
      unwatch();
      release?.();
    }
  }

  /** Wait until no other tab serves from the store. */
  async #claim(): Promise<(() => void) | undefined> {
    this.#waiting = new AbortController();
    if (this.#stopped) return undefined;
    try {
      return await this.#options.store.claim?.({
        signal: this.#waiting.signal,
        waits: () => {
          this.#waitsForTab = true;
          this.#show();
        },
        lost: (error) => this.#lose(error),
      });
    } catch (error) {
      if (this.#stopped) return undefined;
      throw error;
    } finally {
      this.#waitsForTab = false;
    }
  }

  async #serveFrom(store: Store): Promise<void> {
    const { url, name, timing, state, discardUpdate = false, predicts = false, log = () => {} } = this.#options;
    const data = await this.#columns();
    const device = await readOrMakeName(store, name);
    let trusted = await trustFirst(store, this.#keys, (text) => log(text, "warning"));
    const verify = trusted.length > 0 ? await findVerifier() : async () => false;
    const contents = new Contents(store, predicts);
    const outbox = new Outbox(store);
    const enrolment = new Enrolment(store, device, this.#token);
    const masker = new Masker(store, device);
    const trainer = new Trainer(contents, outbox, data, { ...this.#options, log }, masker);
    trainer.engine = this.#options.runtime ?? (await lastChosen(store));
    const changed = (): void => this.#show();
    trainer.onProgress = changed;
    this.#trainer = trainer;
    if (discardUpdate) await outbox.discard();
    while (!this.#stopped) {
      this.#show();
      if (this.#lost !== null) throw this.#lost;
      if (this.#whyPaused !== null) {
        await new Promise<void>((resolve) => {
          this.#wake = resolve;
        });
        continue;
      }
      if (!(await this.#load(trainer, log))) continue;
      const session = await this.#begin(device, examplesOf(data), trusted, outbox);
      this.#driver = new Driver({
        url,
        timing: { ...TIMING, ...timing },
        session,
        enrolment,
        contents,
        outbox,
        trainer,
        masker,
        verify,
        saveTrusted: async (keys) => {
          await writeTrustedKeys(store, keys);
          trusted = keys; // for the run after a pause: a store that was evicted must not make the device trust everybody
        },
        state: async () => ({ ...this.#surroundings, ...(await state?.()), runtime: runtimeName(trainer.engine) }),
        allowed: () => this.#allowed(),
        changed,
        log,
      });
      if (this.#stopped || this.#whyPaused !== null) this.#interrupt();
      await this.#driver.run();
      if (session.finished) return;
      this.#settle();
    }
  }

  /** Load what computes, before the coordinator counts on this device. Returns whether that is done; where it failed, after
   * a wait that grows, or that `resume` or another network ends. */
  async #load(trainer: Trainer, log: Log): Promise<boolean> {
    if (trainer.ready) return true;
    let unlisten = (): void => {};
    let timer: ReturnType<typeof setTimeout> | undefined;
    const woken = new Promise<boolean>((resolve) => {
      this.#wake = () => resolve(false);
    });
    this.#loading = true;
    this.#show();
    try {
      const loaded = await Promise.race([trainer.prepare().then(() => true), woken]);
      if (loaded) this.#loadError = null;
      if (loaded) this.#loadFailures = 0;
      return loaded;
    } catch (error) {
      this.#loadError = `what computes could not be loaded: ${(error as Error).message}`;
      const timing = { ...TIMING, ...this.#options.timing };
      const wait = secondsToWait(timing, ++this.#loadFailures, null, 0.5 + 0.5 * Math.random());
      log(`${this.#loadError}; trying again in ${wait.toFixed(1)} s`, "warning");
      this.#show();
      unlisten = onNetwork(() => this.#wake());
      timer = setTimeout(() => this.#wake(), 1000 * wait);
      await woken;
      return false;
    } finally {
      clearTimeout(timer);
      unlisten();
      this.#loading = false;
    }
  }

  /** Return whether the device may go on, as `consent` says now. */
  async #allowed(): Promise<boolean> {
    if ((await this.#options.consent?.()) === false) {
      this.#refused = true;
      this.#interrupt();
      this.#show();
    }
    return !this.#stopped && this.#whyPaused === null;
  }

  /** Make the session of the next run. */
  async #begin(device: string, examples: number, trusted: readonly string[], outbox: Outbox): Promise<Session> {
    const { url, downloadFrom, untilFinished = false, secure = {} } = this.#options;
    this.#session = new Session(device, examples, {
      software: SOFTWARE,
      algorithms: Object.keys(ALGORITHMS).filter((algorithm) => algorithm !== "plain"),
      exchanges: Object.keys(ANSWERS),
      held: await outbox.load(),
      demands: secure,
      trusted,
      untilFinished,
      httpHosts: httpHosts(url, downloadFrom),
    });
    this.#session.failed = this.#failed;
    return this.#session;
  }

  /** Keep of a run that has ended what it counted. */
  #settle(): void {
    this.#driver = null;
    this.#accepted += this.#session?.accepted ?? 0;
    this.#acceptedBytes += this.#session?.acceptedBytes ?? 0;
    if (this.#session !== null) this.#failed = this.#session.failed;
    this.#session = null;
  }

  /** The store is gone under the device. */
  #lose(error: StoreError): void {
    this.#lost = error;
    const session = this.#session;
    if (session !== null) this.#driver?.post(() => session.abandon(error, "runtime-error"));
    this.#wake();
  }

  /** End the run of the driver: the device stops, or pauses. */
  #interrupt(): void {
    const session = this.#session;
    const paused = this.#stopped ? null : this.#whyPaused;
    if (session !== null) this.#driver?.post(() => session.stop(paused));
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
