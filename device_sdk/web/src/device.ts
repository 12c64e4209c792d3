/** The class that a page uses to serve a coordinator with its own data. */

import { collectExamples, type Examples, isExamples } from "./data/examples.ts";
import { Driver, type Log } from "./driver/driver.ts";
import { findVerifier } from "./driver/signatures.ts";
import { TIMING, type Timing } from "./driver/timing.ts";
import { Session, type Statement } from "./session/session.ts";
import { Contents } from "./storage/contents.ts";
import { Enrolment, readOrMakeName, readToken } from "./storage/identity.ts";
import { Outbox } from "./storage/outbox.ts";
import type { Store } from "./storage/store.ts";
import { checkedKeys, trustFirst, writeTrustedKeys } from "./storage/trusted_keys.ts";
import { ALGORITHMS } from "./training/algorithms.ts";
import { type Columns, examplesOf } from "./training/data.ts";
import { Runtime } from "./training/runtime.ts";
import { Trainer } from "./training/trainer.ts";

const SOFTWARE = "fleetlearn-web 0.1.0";

export interface DeviceOptions {
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
  /** What the device states at each check-in, such as `charging`. What is left out is not known. */
  readonly state?: () => Pick<Statement, "tags" | "tier" | "charging" | "network" | "memory">;
  /** End when the coordinator says that the training is finished. */
  readonly untilFinished?: boolean;
  readonly timing?: Partial<Timing>;
  readonly log?: Log;
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
  #stopped = false;

  /** Throws DataError where the arrays have no examples, and RangeError on a url, a token or a key that cannot be one. */
  constructor(options: DeviceOptions) {
    const { protocol } = new URL(options.url);
    if (protocol !== "ws:" && protocol !== "wss:") {
      throw new RangeError(`${options.url} was given; expected ws://HOST:PORT or wss://HOST:PORT`);
    }
    const token = options.token === undefined ? undefined : readToken(options.token);
    this.#token = token?.secret;
    this.#keys = checkedKeys(options.keys?.length ? options.keys : (token?.keys ?? []));
    if (!isExamples(options.data)) examplesOf(options.data);
    this.#options = options;
  }

  /**
   * Serve until `stop`, or until the training is finished (`untilFinished`).
   *
   * Rejects with StoreError (the store is full, or lost), DataError (the data do not fit the bundle, or are too many), ProtocolError (the
   * coordinator refuses the check-in; `replaced`: another tab or process speaks for the same device; `bad-version` too:
   * the device has keys, and signatures cannot be checked here).
   */
  async serve(): Promise<void> {
    const { url, store, name, timing, untilFinished = false, state, log = () => {} } = this.#options;
    const data = await this.#columns();
    const device = await readOrMakeName(store, name);
    const trusted = await trustFirst(store, this.#keys, (text) => log(text, "warning"));
    const verify = trusted.length > 0 ? await findVerifier() : async () => false;
    const contents = new Contents(store);
    const outbox = new Outbox(store);
    const session = new Session(device, examplesOf(data), {
      software: SOFTWARE,
      algorithms: Object.keys(ALGORITHMS).filter((algorithm) => algorithm !== "plain"),
      held: await outbox.load(),
      trusted,
      untilFinished,
    });
    const trainer = new Trainer(contents, outbox, data);
    this.#driver = new Driver({
      url,
      timing: { ...TIMING, ...timing },
      session,
      enrolment: new Enrolment(store, device, this.#token),
      contents,
      outbox,
      trainer,
      verify,
      saveTrusted: (keys) => writeTrustedKeys(store, keys),
      state: () => ({ ...state?.(), runtime: Runtime.name }),
      log,
    });
    this.#session = session;
    if (this.#stopped) this.stop();
    try {
      await this.#driver.run();
    } finally {
      this.#driver = null;
      this.#stopped = false;
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
    const session = this.#session;
    if (session !== null) this.#driver?.post(() => session.stop());
  }
}
