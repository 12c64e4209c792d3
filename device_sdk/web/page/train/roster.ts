/** The device's line in a helper's roster, for a person who opens it: name and public key. Both are made on first need. */

import { openIndexedDb, rosterLine } from "../../src/index.ts";
import { the, write } from "../shell/elements.ts";
import { STORE } from "./phone.ts";

/** Show the line each time that the person opens its place. */
export function wireRosterLine(): void {
  const box = the<HTMLDetailsElement>("roster-box");
  box.addEventListener("toggle", () => {
    if (box.open) void show();
  });
}

async function show(): Promise<void> {
  write("roster-line", "…");
  try {
    const store = await openIndexedDb(STORE);
    try {
      write("roster-line", await rosterLine(store));
    } finally {
      store.close();
    }
  } catch (error) {
    write("roster-line", `The key cannot be made or read: ${(error as Error).message}`);
  }
}
