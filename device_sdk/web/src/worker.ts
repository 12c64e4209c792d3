/** The script of a Web Worker that a page starts and gives to `startDevice` (remote.ts). One worker, one device. */

import { Device, type Stated } from "./device.ts";
import { type FromWorker, type SentOptions, sentError, type ToWorker } from "./remote.ts";
import { openIndexedDb } from "./storage/indexed_db.ts";

let device: Promise<Device> | null = null;
let answered: (state: Stated) => void = () => {};

function say(message: FromWorker): void {
  postMessage(message);
}

async function make({ store, ...options }: SentOptions): Promise<Device> {
  return new Device({
    ...options,
    store: await openIndexedDb(store),
    state: () =>
      new Promise((resolve) => {
        answered = resolve;
        say({ is: "wants" });
      }),
    log: (text, level) => say({ is: "log", text, level }),
    onChange: (state) => say({ is: "changed", state }),
  });
}

async function carryOut(message: Exclude<ToWorker, { do: "state" }>): Promise<void> {
  if (message.do === "make") {
    device = make(message.options);
    await device;
  } else await (await device)?.[message.do]();
}

addEventListener("message", ({ data }: MessageEvent<ToWorker>) => {
  if (data.do === "state") answered(data.state);
  else {
    const { call } = data;
    carryOut(data).then(
      () => say({ is: "done", call }),
      (error: unknown) => say({ is: "failed", call, error: sentError(error) }),
    );
  }
});
