/** The device of this page: the SDK's, in a worker, with the drawings as its data. */

import { type DeviceState, type RemoteDevice, startDevice } from "../../src/index.ts";
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

export interface PhoneEvents {
  readonly changed: (state: DeviceState) => void;
  /** The device ended by itself; `error` is null where the training is finished. */
  readonly ended: (error: unknown) => void;
}

interface Running {
  readonly worker: Worker;
  readonly device: RemoteDevice;
  readonly served: Promise<void>;
}

export class Phone {
  readonly #url: string;
  readonly #events: PhoneEvents;
  #wanted = false;
  #running: Running | null = null;
  /** The end of the device before, which gives its task back. */
  #ending: Promise<void> = Promise.resolve();
  #token: string | null = null;
  #paused = false;
  #drawings: readonly Drawing[] = [];
  /** The drawings that the device trains on are not these any more. */
  #stale = false;
  /** One of them was deleted: a training on it must not go on. */
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

  /** Begin to serve the coordinator with these drawings. */
  start(drawings: readonly Drawing[], token: string | null, paused = false): void {
    this.#drawings = drawings;
    this.#token = token;
    this.#paused = paused;
    this.#wanted = true;
    void this.#begin();
  }

  pause(): void {
    this.#paused = true;
    void this.#running?.device.pause();
  }

  resume(): void {
    this.#paused = false;
    void this.#running?.device.resume();
  }

  /**
   * Train on these drawings from now on.
   *
   * A task under way is not disturbed: the device begins again when it is free. Unless one was `deleted`: then the device
   * gives the task back. An update that is finished is sent.
   */
  use(drawings: readonly Drawing[], deleted: boolean): void {
    this.#drawings = drawings;
    if (!this.#wanted) return;
    this.#stale = true;
    this.#deleted ||= deleted;
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
    await deleteDatabase(STORE);
  }

  async #begin(): Promise<void> {
    await this.#ending;
    if (!this.#wanted || this.#running !== null) return;
    this.#stale = false;
    this.#deleted = false;
    const worker = new Worker("worker.js", { type: "module" });
    const device = startDevice(worker, {
      url: this.#url,
      data: columnsOf(this.#drawings),
      store: STORE,
      untilFinished: true,
      ...(this.#token !== null && { token: this.#token }),
      onChange: (state) => {
        if (this.#running?.device === device) this.#changed(state);
      },
    });
    if (this.#paused) void device.pause().catch(() => {});
    const running = { worker, device, served: device.serve() };
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
    if (state.phase === "waiting" || state.phase === "downloading") this.#token = null;
    this.#events.changed(state);
    if (this.#settling === undefined) this.#refresh();
  }

  /** Begin again with the drawings as they are now, where that disturbs nothing, or must not wait. */
  #refresh(): void {
    const phase = this.#running?.device.state.phase;
    const free = phase === "waiting" || phase === "connecting" || phase === "paused";
    if (!this.#stale || !(free || (this.#deleted && phase !== "uploading"))) return;
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
