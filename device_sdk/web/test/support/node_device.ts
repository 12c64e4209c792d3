/**
 * A device of this SDK as a process of Node's, for the transcripts and for rounds with a real coordinator:
 * `node --experimental-websocket node_device.mjs URL DATA.npz STATE [--name NAME] [--token TOKEN] [--trust KEY]... [--base SECONDS]`.
 * With `--roster` it prints its line in a helper's roster, and ends.
 */

import { parseArgs } from "node:util";
import { Device, rosterLine } from "../../src/index.ts";
import { FolderStore } from "./folder_store.ts";
import { readNpz } from "./npz.ts";

const { positionals, values } = parseArgs({
  allowPositionals: true,
  options: {
    name: { type: "string" },
    token: { type: "string" },
    trust: { type: "string", multiple: true },
    base: { type: "string" },
    "until-finished": { type: "boolean" },
    roster: { type: "boolean" },
  },
});
const [url, data, state] = positionals as [string, string, string];
const store = new FolderStore(state);
if (values.roster === true) {
  console.log(await rosterLine(store, values.name));
  process.exit(0);
}
const device = new Device({
  url,
  data: readNpz(data),
  store,
  untilFinished: values["until-finished"] ?? false,
  ...(values.name !== undefined && { name: values.name }),
  ...(values.token !== undefined && { token: values.token }),
  ...(values.trust !== undefined && { keys: values.trust }),
  ...(values.base !== undefined && { timing: { base: Number(values.base) } }),
  log: (text, level) => console.log(`${level} ${text}`),
});
process.once("SIGTERM", () => device.stop());
try {
  await device.serve();
} catch (error) {
  console.error(String(error));
  process.exit(1);
}
process.exit(0);
