/** The card of this device: what it does, how far it is, what it gave. */

import type { DeviceState } from "../../src/index.ts";
import { announce, the, write } from "../shell/elements.ts";
import {
  cannotTellWords,
  FEWEST,
  type PhaseWords,
  type Problem,
  phaseWords,
  runtimeWords,
  sizeWords,
} from "../shell/words.ts";

export interface Shown {
  readonly state: DeviceState;
  /** The person pressed Start, and the device has not ended. */
  readonly started: boolean;
  /** The person pressed Pause. */
  readonly paused: boolean;
  /** Why the device cannot connect. */
  readonly trouble: Problem | null;
  /** The training is over, for everybody. */
  readonly finished: boolean;
  readonly drawings: number;
  /** Since this device joined. */
  readonly accepted: number;
  readonly acceptedBytes: number;
}

let said = "";
let busy = false;

const FINISHED: PhaseWords = {
  title: "The training is finished",
  detail: "Thank you for taking part.",
  short: "Finished",
  mood: "busy",
};

export function showDevice({ state, started, paused, drawings, ...told }: Shown): void {
  const { trouble, finished, accepted, acceptedBytes } = told;
  const words = finished ? FINISHED : phaseWords(state, drawings);
  write("phase", words.title);
  write("phase-detail", words.detail);
  write("accepted", `${accepted}`);
  write("sent", sizeWords(acceptedBytes));
  write("count", `${drawings}`);
  write("runtime", runtimeWords(state.runtime));
  const cannotTell = cannotTellWords(state.cannotTell);
  the("cannot-tell").hidden = cannotTell === "";
  write("cannot-tell", cannotTell);
  const pill = the("pill");
  pill.hidden = false;
  pill.dataset.mood = trouble === null ? words.mood : "trouble";
  write("pill-text", trouble?.short ?? words.short);
  showSteps(state, started);
  showButtons({ started, paused, enough: drawings >= FEWEST });
  // A round has many phases: what is said is where it begins and ends.
  if (words.title !== said && (!busy || state.phase === "waiting" || state.phase === "paused")) announce(words.title);
  said = words.title;
  busy = state.phase === "downloading" || state.phase === "training" || state.phase === "uploading";
}

/** The bar stays while the device works: what is below it would jump under a finger. */
function showSteps({ phase, step = 0, steps = 0 }: DeviceState, started: boolean): void {
  the("steps-box").hidden = !started;
  const bar = the<HTMLProgressElement>("steps");
  bar.max = Math.max(1, steps);
  bar.value = phase === "training" ? step : 0;
  write("steps-text", phase === "training" && steps > 0 ? `step ${step} of ${steps}` : "–");
}

/** Of Start, Pause and Resume one is there; the focus moves with it. */
function showButtons({ started, paused, enough }: { started: boolean; paused: boolean; enough: boolean }): void {
  const wanted = !started ? "start" : paused ? "resume" : "pause";
  the<HTMLButtonElement>("start").disabled = !enough;
  const had = ["start", "pause", "resume"].some((id) => id !== wanted && document.activeElement === the(id));
  for (const id of ["start", "pause", "resume"]) the(id).hidden = id !== wanted;
  if (had) the(wanted).focus();
}
