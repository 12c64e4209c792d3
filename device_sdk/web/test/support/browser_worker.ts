/** A device in a Web Worker, for tests in a browser. settings.json beside it says whom it serves, and with what. */

import { Device, openIndexedDb } from "../../src/index.ts";

const { url, x, y } = await (await fetch("settings.json")).json();
const log = (text: string): void => {
  fetch("log", { method: "POST", body: text });
};
try {
  const values = Float32Array.from((x as number[][]).flat());
  const device = new Device({
    url,
    data: {
      x: { values, shape: [x.length, values.length / x.length] },
      y: { values: Float32Array.from(y as number[]), shape: [y.length] },
    },
    store: await openIndexedDb(),
    untilFinished: true,
    log,
  });
  await device.serve();
  log("served until the training was finished");
} catch (error) {
  log(String(error));
}
