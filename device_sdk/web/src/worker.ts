/** The script of a Web Worker that a page starts and gives to `startDevice` (remote.ts). One worker, one device. */

import { Device, type Stated } from "./device.ts";
import { type Surroundings, UNKNOWN } from "./life/surroundings.ts";
import { type FromWorker, type SentOptions, sentError, type ToWorker } from "./remote.ts";
import { openIndexedDb } from "./storage/indexed_db.ts";
import { MemoryStore } from "./storage/store.ts";

let device: Promise<Device> | null = null;
let answered: (state: Stated) => void = () => {};
const unanswered: ((given: boolean) => void)[] = [];
let surroundings: Surroundings = UNKNOWN;
let see: (now: Surroundings) => void = () => {};

function say(message: FromWorker): void {
  postMessage(message);
}

function askConsent(): Promise<boolean> {
  return new Promise((resolve) => {
    unanswered.push(resolve);
    say({ is: "asks" });
  });
}

async function make({ store, asks, ...options }: SentOptions): Promise<Device> {
  return new Device({
    ...options,
    store: store === null ? new MemoryStore() : await openIndexedDb(store),
    watch: (tell) => {
      see = tell;
      tell(surroundings);
      return () => {
        see = () => {};
      };
    },
    state: () =>
      new Promise((resolve) => {
        answered = resolve;
        say({ is: "wants" });
      }),
    ...(asks && { consent: askConsent }),
    log: (text, level) => say({ is: "log", text, level }),
    onChange: (state) => say({ is: "changed", state }),
  });
}

async function call(message: Extract<ToWorker, { call: number }>): Promise<void> {
  if (message.do === "make") {
    device = make(message.options);
    await device;
  } else await (await device)?.[message.do]();
}

addEventListener("message", ({ data }: MessageEvent<ToWorker>) => {
  if (data.do === "state") answered(data.state);
  else if (data.do === "consent") unanswered.shift()?.(data.given);
  else if (data.do === "see") {
    surroundings = data.surroundings;
    see(surroundings);
  } else {
    call(data).then(
      () => say({ is: "done", call: data.call }),
      (error: unknown) => say({ is: "failed", call: data.call, error: sentError(error) }),
    );
  }
});
