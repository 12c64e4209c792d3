/** The class that a page uses to serve a coordinator with its own data. */

import { Driver, type Log } from "./driver/driver.ts";
import { TIMING, type Timing } from "./driver/timing.ts";
import { Session, type Statement } from "./session/session.ts";
import { Contents } from "./storage/contents.ts";
import { Enrolment, readOrMakeName } from "./storage/identity.ts";
import { Outbox } from "./storage/outbox.ts";
import type { Store } from "./storage/store.ts";
import { ALGORITHMS } from "./training/algorithms.ts";
import { type Columns, examplesOf } from "./training/data.ts";
import { Runtime } from "./training/runtime.ts";
import { Trainer } from "./training/trainer.ts";

const SOFTWARE = "fleetlearn-web 0.1.0";
const TOKEN = /^[A-Za-z0-9_-]{43,128}$/;

export interface DeviceOptions {
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
  #driver: Driver | null = null;
  #session: Session | null = null;
  #stopped = false;

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
    examplesOf(options.data);
    this.#options = options;
  }

  /**
   * Serve until `stop`, or until the training is finished (`untilFinished`).
   *
   * Rejects with StoreError (the store is full, or lost), DataError (the data do not fit the bundle), ProtocolError (the
   * coordinator refuses the check-in; `replaced`: another tab or process speaks for the same device).
   */
  async serve(): Promise<void> {
    const { url, data, store, name, token, timing, untilFinished = false, state, log = () => {} } = this.#options;
    const device = await readOrMakeName(store, name);
    const contents = new Contents(store);
    const outbox = new Outbox(store);
    const session = new Session(device, examplesOf(data), {
      software: SOFTWARE,
      algorithms: Object.keys(ALGORITHMS).filter((algorithm) => algorithm !== "plain"),
      held: await outbox.load(),
      untilFinished,
    });
    const trainer = new Trainer(contents, outbox, data);
    this.#driver = new Driver({
      url,
      timing: { ...TIMING, ...timing },
      session,
      enrolment: new Enrolment(store, device, token),
      contents,
      outbox,
      trainer,
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

  /** End `serve` soon. A task under way is given back; a finished update stays in the store for the next start. */
  stop(): void {
    this.#stopped = true;
    const session = this.#session;
    if (session !== null) this.#driver?.post(() => session.stop());
  }
}
