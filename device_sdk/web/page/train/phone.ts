/** The device of this page: the SDK's, in a worker, with the drawings as its data. */

import {
  type Conditions,
  type DeviceState,
  eraseStore,
  openIndexedDb,
  type RemoteDevice,
  startDevice,
} from "../../src/index.ts";
import { columnsOf } from "../draw/drawings.ts";
import { type Drawing, deleteDatabase } from "../shell/records.ts";

/** The name of the SDK's database. */
export const STORE = "fleetlearn-digits";
/** Milliseconds for which a device may give its task back before its worker is ended. */
const PATIENCE = 3000;
/** Milliseconds without a change of the drawings after which the device begins again: with more, and with fewer. */
const SETTLED = 5000;
const SETTLED_FEWER = 1000;

const STOPPED: DeviceState = { phase: "stopped", accepted: 0, acceptedBytes: 0 };

/** How the device begins. */
export interface Beginning {
  /** Until the coordinator has taken it. */
  readonly token: string | null;
  readonly paused: boolean;
  readonly only: Conditions;
  /** Whether the browser keeps what the device stores. */
  readonly lasting: boolean;
  /** Whether a finished update from before is deleted in place of being sent: a drawing was deleted since. */
  readonly discard: boolean;
}

export interface PhoneEvents {
  readonly changed: (state: DeviceState) => void;
  /** A finished update from before a drawing was deleted is deleted now. */
  readonly discarded: () => void;
  /** Whether the person still wants this, as far as the page knows now. */
  readonly consent: () => Promise<boolean>;
  /** The device ended by itself; `error` is null where the training is finished. */
  readonly ended: (error: unknown) => void;
}

interface Running {
  readonly worker: Worker;
  readonly device: RemoteDevice;
  readonly served: Promise<void>;
  readonly discards: boolean;
}

export class Phone {
  readonly #url: string;
  readonly #events: PhoneEvents;
  #wanted = false;
  #running: Running | null = null;
  /** The end of the device before, which gives its task back. */
  #ending: Promise<void> = Promise.resolve();
  #beginning: Beginning = { token: null, paused: false, only: {}, lasting: true, discard: false };
  #drawings: readonly Drawing[] = [];
  /** The drawings that the device trains on are not these any more. */
  #stale = false;
  /** One of them was deleted: nothing that was trained on it may be sent. */
  #deleted = false;
  #settling: ReturnType<typeof setTimeout> | undefined;

  constructor(url: string, events: PhoneEvents) {
    this.#url = url;
    this.#events = events;
  }

  /** Whether it was started, and neither stopped nor ended by itself. */
  get started(): boolean {
    return this.#wanted;
  }

  /** Whether the device has no drawing that was deleted. */
  get hasOnlyKept(): boolean {
    return !this.#deleted;
  }

  /** Begin to serve the coordinator with these drawings. */
  start(drawings: readonly Drawing[], beginning: Beginning): void {
    this.#drawings = drawings;
    this.#beginning = beginning;
    this.#wanted = true;
    void this.#begin();
  }

  pause(): void {
    this.#beginning = { ...this.#beginning, paused: true };
    void this.#running?.device.pause();
  }

  resume(): void {
    this.#beginning = { ...this.#beginning, paused: false };
    void this.#running?.device.resume();
  }

  /** Serve only while these hold, from now on. */
  require(only: Conditions): void {
    this.#beginning = { ...this.#beginning, only };
    this.#beginAgain();
  }

  /**
   * Train on these drawings from now on.
   *
   * A task under way is not disturbed: the device begins again when it is free. Unless one was `deleted`: then the device
   * gives the task back, and deletes an update that is finished and was not taken yet.
   */
  use(drawings: readonly Drawing[], deleted: boolean): void {
    this.#drawings = drawings;
    if (!this.#wanted) return;
    this.#stale = true;
    if (deleted) {
      this.#deleted = true;
      this.#beginning = { ...this.#beginning, discard: true };
    }
    clearTimeout(this.#settling);
    this.#settling = setTimeout(
      () => {
        this.#settling = undefined;
        this.#refresh();
      },
      this.#deleted ? SETTLED_FEWER : SETTLED,
    );
  }

  /** End the device: it gives a task under way back, and keeps its name and a finished update. */
  async stop(): Promise<void> {
    this.#wanted = false;
    clearTimeout(this.#settling);
    this.#settling = undefined;
    await this.#end();
    if (!this.#wanted) this.#events.changed(STOPPED);
  }

  /** End the device and delete all that it kept. */
  async erase(): Promise<void> {
    await this.stop();
    try {
      // Emptied first: the database itself stays for as long as a frozen tab has it open.
      const store = await openIndexedDb(STORE);
      await eraseStore(store);
      store.close();
    } finally {
      await deleteDatabase(STORE);
    }
  }

  async #begin(): Promise<void> {
    await this.#ending;
    if (!this.#wanted || this.#running !== null) return;
    this.#stale = false;
    this.#deleted = false;
    const worker = new Worker("worker.js", { type: "module" });
    const { token, paused, only, lasting, discard } = this.#beginning;
    const device = startDevice(worker, {
      url: this.#url,
      data: columnsOf(this.#drawings),
      store: lasting ? STORE : null,
      untilFinished: true,
      only,
      consent: this.#events.consent,
      discardUpdate: discard,
      ...(token !== null && { token }),
      onChange: (state) => {
        if (this.#running?.device === device) this.#changed(state);
      },
    });
    if (paused) void device.pause().catch(() => {});
    const running = { worker, device, served: device.serve(), discards: discard };
    this.#running = running;
    const ended = (error: unknown): void => {
      if (this.#running !== running) return; // it was told to
      this.#running = null;
      this.#wanted = false;
      worker.terminate();
      this.#events.changed(STOPPED);
      this.#events.ended(error);
    };
    running.served.then(() => ended(null), ended);
  }

  #changed(state: DeviceState): void {
    // Whoever waits for a task or has one has been let in: the token did what it is for.
    const letIn = state.phase === "waiting" || state.phase === "downloading";
    if (letIn) this.#beginning = { ...this.#beginning, token: null };
    if (letIn && this.#running?.discards === true && this.#beginning.discard && !this.#deleted) {
      this.#beginning = { ...this.#beginning, discard: false };
      this.#events.discarded();
    }
    this.#events.changed(state);
    if (this.#settling === undefined) this.#refresh();
  }

  /** Begin again with the drawings as they are now, where that disturbs nothing, or must not wait. */
  #refresh(): void {
    const phase = this.#running?.device.state.phase;
    const free = phase === "waiting" || phase === "loading" || phase === "connecting" || phase === "paused";
    if (!this.#stale || !(free || this.#deleted)) return;
    this.#beginAgain();
  }

  #beginAgain(): void {
    if (!this.#wanted) return;
    void this.#end();
    void this.#begin();
  }

  /** End the device that runs, and then its worker. */
  #end(): Promise<void> {
    const running = this.#running;
    this.#running = null;
    if (running !== null) {
      const { device, served, worker } = running;
      void device.stop().catch(() => {});
      const waited = new Promise<void>((resolve) => setTimeout(resolve, PATIENCE));
      this.#ending = Promise.race([served.catch(() => {}), waited]).then(() => worker.terminate());
    }
    return this.#ending;
  }
}
