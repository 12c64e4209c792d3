/** The page's tabs on one device: what one of them changes, the others do too. */

import type { Choices, Drawing } from "./records.ts";

const CHANNEL = "fleetlearn-page";

/** Tells the other tabs that what they share, the records, has changed. What it is, they read there. */
export class Tabs {
  readonly #channel = new BroadcastChannel(CHANNEL);

  /** changed: called when another tab changed something, and whenever this one is shown or goes on after it was frozen: it
   * may have missed what was told meanwhile. */
  constructor(changed: () => void) {
    this.#channel.onmessage = changed;
    const shown = (): void => {
      if (document.visibilityState === "visible") changed();
    };
    document.addEventListener("visibilitychange", shown);
    document.addEventListener("resume", changed); // of a frozen tab (Page Lifecycle)
    addEventListener("pageshow", changed);
  }

  tell(): void {
    this.#channel.postMessage("changed");
  }
}

/** What the tabs share. */
export interface Shared {
  readonly choices: Choices;
  readonly drawings: readonly Drawing[];
}

/** What another tab did. */
export interface Changes {
  /** The person left. */
  readonly left: boolean;
  /** The person pressed Start, or the training ended; null: neither. */
  readonly training: boolean | null;
  readonly paused: boolean | null;
  /** The conditions are others. */
  readonly conditions: boolean;
  /** null: the drawings are the same. */
  readonly drawings: "more" | "deleted" | null;
}

/** Return what another tab did between two looks at the records. */
export function changesOf(before: Shared, now: Shared): Changes {
  const changed = (name: "training" | "paused"): boolean | null =>
    before.choices[name] === now.choices[name] ? null : now.choices[name];
  const conditions = (["charging", "unmetered"] as const).some((name) => before.choices[name] !== now.choices[name]);
  const ids = new Set(now.drawings.map(({ id }) => id));
  const deleted = before.drawings.some(({ id }) => !ids.has(id));
  const more = now.drawings.length > before.drawings.length;
  return {
    left: before.choices.joined !== null && before.choices.joined !== now.choices.joined,
    training: changed("training"),
    paused: changed("paused"),
    conditions,
    drawings: deleted ? "deleted" : more ? "more" : null,
  };
}
