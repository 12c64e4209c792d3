/** The device of this page: the SDK's, in a worker, with the drawings as its data. */

import { type DeviceState, type RemoteDevice, startDevice } from "../../src/index.ts";
import { columnsOf } from "../draw/drawings.ts";
import { type Drawing, deleteDatabase } from "../shell/records.ts";

/** The name of the SDK's database. */
export const STORE = "fleetlearn-digits";
/** Milliseconds for which a device may give its task back before its worker is ended. */
const PATIENCE = 3000;
/** Milliseconds without a change of the drawings after which the device begins again with the new ones. */
const SETTLED = 5000;

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
  #running: Running | null = null;
  #token: string | null = null;
  #paused = false;
  #drawings: readonly Drawing[] = [];
  /** The drawings that the device trains on are not these any more. */
  #stale = false;
  #settling: ReturnType<typeof setTimeout> | undefined;

  constructor(url: string, events: PhoneEvents) {
    this.#url = url;
    this.#events = events;
  }

  get started(): boolean {
    return this.#running !== null;
  }

  /** Begin to serve the coordinator with these drawings. */
  start(drawings: readonly Drawing[], token: string | null, paused = false): void {
    this.#drawings = drawings;
    this.#token = token;
    this.#paused = paused;
    this.#begin();
  }

  pause(): void {
    this.#paused = true;
    void this.#running?.device.pause();
  }

  resume(): void {
    this.#paused = false;
    void this.#running?.device.resume();
  }

  /** Train on these drawings from now on. A task under way is not disturbed: the device begins again when it is free. */
  use(drawings: readonly Drawing[]): void {
    this.#drawings = drawings;
    if (this.#running === null) return;
    this.#stale = true;
    clearTimeout(this.#settling);
    this.#settling = setTimeout(() => this.#refresh(), SETTLED);
  }

  /** End the device: it gives a task under way back, and keeps its name and a finished update. */
  async stop(): Promise<void> {
    clearTimeout(this.#settling);
    this.#stale = false;
    const running = this.#running;
    this.#running = null;
    if (running === null) return;
    void running.device.stop().catch(() => {});
    await Promise.race([running.served.catch(() => {}), new Promise((resolve) => setTimeout(resolve, PATIENCE))]);
    running.worker.terminate();
    this.#events.changed(STOPPED);
  }

  /** End the device and delete all that it kept. */
  async erase(): Promise<void> {
    await this.stop();
    await deleteDatabase(STORE);
  }

  #begin(): void {
    this.#stale = false;
    const worker = new Worker("worker.js", { type: "module" });
    const device = startDevice(worker, {
      url: this.#url,
      data: columnsOf(this.#drawings),
      store: STORE,
      untilFinished: true,
      ...(this.#token !== null && { token: this.#token }),
      onChange: (state) => {
        if (this.#running?.device !== device) return;
        this.#events.changed(state);
        this.#refresh();
      },
    });
    if (this.#paused) void device.pause().catch(() => {});
    const served = device.serve();
    const running = { worker, device, served };
    this.#running = running;
    const end = (error: unknown): void => {
      if (this.#running !== running) return; // it was stopped
      this.#running = null;
      worker.terminate();
      this.#events.changed(STOPPED);
      this.#events.ended(error);
    };
    served.then(() => end(null), end);
  }

  /** Begin again with the drawings as they are now, where that disturbs nothing. */
  #refresh(): void {
    const phase = this.#running?.device.state.phase;
    if (!this.#stale || (phase !== "waiting" && phase !== "connecting")) return;
    clearTimeout(this.#settling);
    void this.stop().then(() => this.#begin());
  }
}
