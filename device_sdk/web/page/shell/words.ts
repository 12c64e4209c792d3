/** What the page says about the device and about mistakes, in plain words. */

import { type DeviceState, ProtocolError, StoreError } from "../../src/index.ts";

/** What happened, and what the person can do. */
export interface Problem {
  readonly what: string;
  readonly advice: string;
  /** One or two words, for the header. */
  readonly short?: string;
}

export interface PhaseWords {
  readonly title: string;
  readonly detail: string;
  /** One or two words, for the header. */
  readonly short: string;
  readonly mood: "idle" | "busy" | "trouble";
}

/** Training begins with this number of drawings: an update of fewer says much about each of them. */
export const FEWEST = 5;
/** What a device of the SDK says while another tab has its store. */
export const OTHER_TAB = "another tab or window serves as this device";

/** Return the words for what the device does. */
export function phaseWords(state: DeviceState, drawings: number): PhaseWords {
  const round = state.round === undefined ? "" : ` in round ${state.round}`;
  switch (state.phase) {
    case "loading":
      return state.failed === undefined
        ? { title: "Loading what trains", detail: "Some megabytes, the first time.", short: "Loading", mood: "idle" }
        : {
            title: "This device cannot train now",
            detail: `${sentence(state.failed)} The page tries again by itself; another browser, or a newer one, may do.`,
            short: "Cannot train",
            mood: "trouble",
          };
    case "connecting":
      return { title: "Connecting", detail: "Looking for the coordinator.", short: "Connecting", mood: "idle" };
    case "waiting":
      if (state.failed !== undefined) {
        return {
          title: "Waiting for the next round",
          detail: `The last round did not work on this device: ${state.failed}`,
          short: "Failed",
          mood: "trouble",
        };
      }
      return {
        title: "Waiting for the next round",
        detail: "Nothing to do on this page: your device is called when it is needed.",
        short: "Waiting",
        mood: "busy",
      };
    case "downloading":
      return {
        title: "Fetching the shared model",
        detail: `Your device takes part${round}.`,
        short: "Fetching",
        mood: "busy",
      };
    case "training":
      return {
        title: `Training on your ${plural(drawings, "drawing")}`,
        detail: `Your device takes part${round}.`,
        short: "Training",
        mood: "busy",
      };
    case "uploading":
      return {
        title: "Sending the update",
        detail: "The numbers by which the model changed; no drawing is in it.",
        short: "Sending",
        mood: "busy",
      };
    case "paused":
      return pausedWords(state.why);
    case "stopped":
      return drawings < FEWEST
        ? {
            title: `Draw ${plural(FEWEST - drawings, "more digit")} to begin`,
            detail: `Training begins with ${FEWEST} drawings.`,
            short: "Not started",
            mood: "idle",
          }
        : {
            title: "Ready to train",
            detail: "Press Start: your device then takes part in each round until you pause it.",
            short: "Ready",
            mood: "idle",
          };
  }
}

/** Whatever is not the person's own pause says for what the device waits. */
function pausedWords(why: string | undefined): PhaseWords {
  if (why === undefined || why === "the device is paused") {
    const detail = "Nothing is sent and nothing is trained until you resume.";
    return { title: "Paused", detail, short: "Paused", mood: "idle" };
  }
  return {
    title: "Not training now",
    detail: sentence(why),
    short: why === OTHER_TAB ? "Other tab" : "Waiting",
    mood: "idle",
  };
}

/** Return a reason as a sentence. */
function sentence(why: string): string {
  return `${why[0]!.toUpperCase()}${why.slice(1).replace(/\.$/, "")}.`;
}

/** Return the words beside the pad: what was kept last, and how many drawings there are. */
export function keptWords(label: number | null, drawings: number, started = true): string {
  const keptAs = label === null ? "" : `Kept as ${label}. `;
  if (drawings < FEWEST) return `${keptAs}${drawings} of ${FEWEST} drawings.`;
  const next = started ? "" : " Enough to start training.";
  return `${keptAs}${plural(drawings, "drawing")}.${next}`;
}

/** Return what the browser cannot tell of the person's conditions, in words; empty where it tells everything. */
export function cannotTellWords(cannotTell: DeviceState["cannotTell"] = []): string {
  const what = { charging: "whether this device charges", network: "what the network costs" };
  const unknown = cannotTell.map((one) => what[one]).join(" and ");
  return unknown === "" ? "" : `This browser does not say ${unknown}: the device trains all the same.`;
}

/** Return the words for an error that ended the device. */
export function endedWords(error: unknown): Problem {
  if (error instanceof ProtocolError && error.code === "replaced") {
    return {
      what: "Another tab trains for this device.",
      advice: "One tab is enough: close the other one, then press Start here.",
    };
  }
  if (error instanceof ProtocolError) {
    return {
      what: "The coordinator and this page do not understand each other.",
      advice: `Reload the page. (${error.text})`,
    };
  }
  if (error instanceof StoreError) return storageWords(error.reason);
  const message = error instanceof Error ? error.message : String(error);
  return { what: "The training stopped unexpectedly.", advice: `Press Start to try again. (${message})` };
}

/** Return the words for storage that failed. */
export function storageWords(reason: StoreError["reason"]): Problem {
  switch (reason) {
    case "full":
      return {
        what: "This device has no room left for the page.",
        advice: "Free some storage, or delete a few drawings, then try again.",
      };
    case "lost":
      return {
        what: "This device was erased, in another tab or by the browser.",
        advice: "Reload the page. To train again you may need a new invitation.",
      };
    case "refused":
    case "failed":
      return {
        what: "The browser’s storage does not work.",
        advice: "Reload the page. In a private window, open it in a normal one.",
      };
  }
}

/** Return the words for what the page's own database rejected with. */
export function recordsWords(error: unknown): Problem {
  return storageWords((error as Partial<DOMException> | null)?.name === "QuotaExceededError" ? "full" : "failed");
}

/** Return the words for a device that cannot connect; null while it may still be early. */
export function connectionWords(seen: {
  /** What the browser says. */
  readonly online: boolean;
  /** How long the device has been connecting, in seconds. */
  readonly seconds: number;
  /** Whether the page's host answers; null where nobody knows. */
  readonly hostAnswers: boolean | null;
  /** Whether the page came over https, or from this machine. */
  readonly secure: boolean;
  readonly origin: string;
  /** Whether the coordinator takes devices from this page; null where nobody knows. */
  readonly takesPage: boolean | null;
  /** `used`: the device was let in before. `not needed`: the coordinator invites nobody. */
  readonly invitation: "given" | "used" | "none" | "not needed";
}): Problem | null {
  if (!seen.online) {
    return {
      what: "You are offline.",
      advice: "You can go on drawing; the training goes on when the network is back.",
      short: "Offline",
    };
  }
  if (seen.takesPage === false) return placeWords(seen.origin, seen.secure);
  if (seen.seconds < 10) return null;
  if (seen.hostAnswers === true) {
    const problem = { what: "The coordinator does not let this device in.", short: "Not let in" };
    const reason = seen.secure
      ? `take no devices from pages of ${seen.origin}`
      : "refuse pages that did not come over https";
    const unknown = seen.takesPage === null ? ` It may also ${reason}.` : "";
    return { ...problem, advice: `${INVITATION_ADVICE[seen.invitation]}${unknown} This page goes on trying.` };
  }
  return {
    what:
      seen.hostAnswers === false
        ? "The coordinator cannot be reached."
        : "The coordinator cannot be reached, or does not let this device in.",
    advice: "This page goes on trying. Your drawings and a finished update are kept.",
    short: "Not connected",
  };
}

/** Return the words for a page at an address from which the coordinator takes no devices. */
export function placeWords(origin: string, secure: boolean): Problem {
  return {
    what: `The coordinator takes no devices from ${origin}, where you opened this page.`,
    advice: secure
      ? "Open the page at the address of your invitation, or ask the operator to add this one to `origins`."
      : "The page did not come over https. Ask for a link that begins with https://; your invitation is not to blame.",
    short: "Wrong address",
  };
}

/** What a person can do whose device is refused, by what is known of its invitation. */
const INVITATION_ADVICE = {
  given: "The invitation may be used up, over, or withdrawn: ask for a new link.",
  used: "It did before. Perhaps its operator removed this device, or too many connect at the moment. Ask for a new link.",
  none: "This device has no invitation: ask for a link, and open it here.",
  "not needed": "Perhaps too many devices connect at the moment.",
} as const;

export function plural(count: number, word: string): string {
  return `${count} ${word}${count === 1 ? "" : "s"}`;
}

/** Return a size for people. */
export function sizeWords(bytes: number): string {
  if (bytes < 1024) return `${bytes} B`;
  if (bytes < 1024 * 1024) return `${(bytes / 1024).toFixed(0)} KiB`;
  return `${(bytes / 1024 / 1024).toFixed(1)} MiB`;
}

/** Return what trains, for people: `onnx 1.30.0 web wasm, 4 threads` is `WebAssembly, 4 threads`. */
export function runtimeWords(runtime: string | undefined): string {
  if (runtime === undefined) return "–";
  const kind = /webgpu/i.test(runtime) ? "WebGPU" : /wasm/i.test(runtime) ? "WebAssembly" : runtime;
  const threads = /(\d+) threads?/.exec(runtime)?.[0];
  return threads === undefined ? kind : `${kind}, ${threads}`;
}
