/** A device in a Web Worker, as the page has it: the same methods, carried by messages (worker.ts is the other side). */

import { collectExamples, isExamples } from "./data/examples.ts";
import type { DeviceOptions, Stated } from "./device.ts";
import type { DeviceState } from "./life/state.ts";
import { type Surroundings, watchSurroundings } from "./life/surroundings.ts";
import { type Code, ProtocolError } from "./protocol/errors.ts";
import { StoreError } from "./storage/errors.ts";
import type { Columns } from "./training/data.ts";
import { DataError } from "./training/errors.ts";

/** As for a `Device`. The data are collected in the page, and copied to the worker. */
export type RemoteOptions = Omit<DeviceOptions, "store"> & {
  /** The name of the database (`openIndexedDb`) that the worker opens; null: a store in memory. */
  readonly store?: string | null;
};

export type Method = "serve" | "stop" | "pause" | "resume" | "erase";

/** What of the options crosses to the worker as it is. */
export type SentOptions = Omit<RemoteOptions, "data" | "state" | "watch" | "log" | "onChange" | "consent"> & {
  readonly data: Columns;
  /** Whether the page has a `consent` to be asked for. */
  readonly asks: boolean;
};

/** What the page says. `call` numbers the calls. */
export type ToWorker =
  | { readonly do: "make"; readonly call: number; readonly options: SentOptions }
  | { readonly do: Method; readonly call: number }
  /** What the page sees, and a worker does not: the battery. */
  | { readonly do: "see"; readonly surroundings: Surroundings }
  /** The answer to `wants`. */
  | { readonly do: "state"; readonly state: Stated }
  /** The answer to `asks`. */
  | { readonly do: "consent"; readonly given: boolean };

/** What the worker says. */
export type FromWorker =
  | { readonly is: "done"; readonly call: number }
  | { readonly is: "failed"; readonly call: number; readonly error: SentError }
  | { readonly is: "changed"; readonly state: DeviceState }
  | { readonly is: "log"; readonly text: string; readonly level: "info" | "warning" }
  /** May the device go on? Answers come in the order of the questions. */
  | { readonly is: "asks" }
  /** The device checks in: what does it state? */
  | { readonly is: "wants" };

/** An error, which a message would bring without its class. */
export interface SentError {
  readonly name: string;
  readonly message: string;
  readonly text?: string;
  readonly code?: Code;
  readonly reason?: StoreError["reason"];
}

/** Start a device in a worker that runs this package's worker.ts. One worker, one device. */
export function startDevice(worker: Worker, options: RemoteOptions): RemoteDevice {
  return new RemoteDevice(worker, options);
}

/** A device in a worker. Its promises reject as `Device`'s promises do, and with Error where the worker itself failed. */
export class RemoteDevice {
  readonly #worker: Worker;
  readonly #options: RemoteOptions;
  readonly #calls = new Map<number, { resolve: () => void; reject: (error: Error) => void }>();
  readonly #made: Promise<void>;
  /** The answer to the last question whether the device may go on. */
  #consents: Promise<void> = Promise.resolve();
  #lastCall = 0;
  #state: DeviceState = { phase: "stopped", accepted: 0, acceptedBytes: 0 };

  constructor(worker: Worker, options: RemoteOptions) {
    this.#worker = worker;
    this.#options = options;
    worker.addEventListener("message", ({ data }: MessageEvent<FromWorker>) => this.#hear(data));
    worker.addEventListener("error", ({ message }) => this.#fail(message));
    this.#made = this.#make();
    this.#made.catch(() => {}); // each method rejects with it
    const { watch = watchSurroundings } = options;
    watch((surroundings) => this.#say({ do: "see", surroundings }));
  }

  async #make(): Promise<void> {
    const { data, state: _, watch: __, log: ___, onChange: ____, consent, ...sent } = this.#options;
    const columns = isExamples(data) ? await collectExamples(data) : data;
    await this.#call((call) => ({
      do: "make",
      call,
      options: { ...sent, data: columns, asks: consent !== undefined },
    }));
  }

  /** What the device did when the worker last said so. */
  get state(): DeviceState {
    return this.#state;
  }

  /** Serve as `Device.serve` does. Rejects also with what the constructor of `Device` throws. */
  async serve(): Promise<void> {
    await this.#made;
    await this.#ask("serve");
  }

  async stop(): Promise<void> {
    await this.#ask("stop");
  }

  async pause(): Promise<void> {
    await this.#ask("pause");
  }

  async resume(): Promise<void> {
    await this.#ask("resume");
  }

  async erase(): Promise<void> {
    await this.#made;
    await this.#ask("erase");
  }

  async #ask(method: Method): Promise<void> {
    await this.#made.catch(() => {}); // the worker has no device before, while data are collected
    await this.#call((call) => ({ do: method, call }));
  }

  #call(message: (call: number) => ToWorker): Promise<void> {
    const call = ++this.#lastCall;
    return new Promise((resolve, reject) => {
      this.#calls.set(call, { resolve, reject });
      this.#say(message(call));
    });
  }

  #say(message: ToWorker): void {
    this.#worker.postMessage(message);
  }

  #hear(message: FromWorker): void {
    switch (message.is) {
      case "done":
        this.#calls.get(message.call)?.resolve();
        this.#calls.delete(message.call);
        return;
      case "failed":
        this.#calls.get(message.call)?.reject(errorOf(message.error));
        this.#calls.delete(message.call);
        return;
      case "changed":
        this.#state = message.state;
        this.#options.onChange?.(message.state);
        return;
      case "log":
        this.#options.log?.(message.text, message.level);
        return;
      case "wants":
        void this.#answer();
        return;
      case "asks":
        this.#consents = this.#consents.then(() => this.#sayConsent());
    }
  }

  async #sayConsent(): Promise<void> {
    let given = false; // where the page cannot say, nothing is sent
    try {
      given = (await this.#options.consent?.()) ?? true;
    } catch (error) {
      this.#options.log?.(
        `the page could not say whether the device may go on: ${(error as Error).message}`,
        "warning",
      );
    }
    this.#say({ do: "consent", given });
  }

  async #answer(): Promise<void> {
    this.#say({ do: "state", state: (await this.#options.state?.()) ?? {} });
  }

  /** The worker could not be loaded, or nobody caught an error in it. */
  #fail(text: string): void {
    const error = new Error(`the device's worker failed: ${text || "its script could not be loaded"}`);
    for (const { reject } of this.#calls.values()) reject(error);
    this.#calls.clear();
    const { accepted, acceptedBytes } = this.#state;
    this.#state = { phase: "stopped", accepted, acceptedBytes, why: error.message };
    this.#options.onChange?.(this.#state);
  }
}

export function sentError(error: unknown): SentError {
  const { name = "Error", message = String(error) } = error as Partial<Error>;
  if (error instanceof ProtocolError) return { name, message, code: error.code, text: error.text };
  return error instanceof StoreError ? { name, message, reason: error.reason } : { name, message };
}

function errorOf({ name, message, code, text, reason }: SentError): Error {
  if (code !== undefined && text !== undefined) return new ProtocolError(code, text);
  if (reason !== undefined) return new StoreError(message, reason);
  if (name === "DataError") return new DataError(message);
  return Object.assign(new Error(message), { name });
}
