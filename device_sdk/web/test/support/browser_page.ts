/** A page with a device in a worker, for tests in a browser. settings.json beside it says whom it serves, and with what.
 * A test reads `states` and `lines`, and calls `device`, by Playwright. */

import { type DeviceState, keepStorage, openIndexedDb, rosterLine, ScreenLock, startDevice } from "../../src/index.ts";

const { url, x, y, ...options } = await (await fetch("settings.json")).json();
const values = Float32Array.from((x as number[][]).flat());
const states: DeviceState[] = [];
const lines: string[] = [];
const log = (text: string): void => {
  lines.push(text);
  fetch("log", { method: "POST", body: text });
};
const device = startDevice(new Worker("worker.js", { type: "module" }), {
  url,
  data: {
    x: { values, shape: [x.length, values.length / x.length] },
    y: { values: Float32Array.from(y as number[]), shape: [y.length] },
  },
  untilFinished: true,
  log,
  onChange: (state) => states.push(state),
  ...options,
});
const ownLine = async (): Promise<string> => rosterLine(await openIndexedDb());
Object.assign(globalThis, { device, states, lines, screenLock: new ScreenLock(), keepStorage, ownLine });
device.serve().then(
  () => log("served until the training was finished"),
  (error: unknown) => log(String(error)),
);
