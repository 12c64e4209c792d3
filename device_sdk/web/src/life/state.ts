/** What a device does now, for the page that shows it. */

import type { Session } from "../session/session.ts";
import { isUnfinished, isUnmasked } from "../session/states.ts";

export type Phase =
  | "loading"
  | "connecting"
  | "waiting"
  | "downloading"
  | "training"
  | "uploading"
  | "paused"
  | "stopped";

export interface DeviceState {
  /**
   * `loading`: what computes is being loaded, before the device asks for tasks; `failed` says why it could not be loaded,
   * and then the device tries again by itself. `connecting`: not connected, and nothing to do meanwhile. `waiting`: for a task, or for the time at which the
   * coordinator told the device to come back. `uploading`: an update or a measurement is finished and not acknowledged
   * yet. `paused`: `why` says for what. `stopped`: before `serve`, and after it.
   */
  readonly phase: Phase;
  /** The round of the task, where the device has one and it is not an evaluation. */
  readonly round?: number;
  /** Steps of the task's training that are done, and how many it has. */
  readonly step?: number;
  readonly steps?: number;
  /** Of the last step. */
  readonly loss?: number;
  /** Updates that the coordinator has accepted since this `Device` was made. */
  readonly accepted: number;
  /** Bytes of these updates. */
  readonly acceptedBytes: number;
  /** Why the device is not connected, is paused or has stopped, in words for people. */
  readonly why?: string;
  /** Why the last task failed on this device, or why what computes cannot be loaded, in words for people. It goes away
   * with the next update that is accepted, or once what computes is loaded. */
  readonly failed?: string;
  /** The conditions (`only`) that the browser does not tell: they may hold or not. The device serves all the same. */
  readonly cannotTell?: readonly ("charging" | "network")[];
  /** What trains. */
  readonly runtime?: string;
}

/** How far the training of a task is. */
export interface Progress {
  readonly step: number;
  readonly steps: number;
  readonly loss: number;
}

/** Return what a session that runs is at. `returning`: it was told when to come back. */
export function activityOf(session: Session, returning: boolean): Pick<DeviceState, "phase" | "round"> {
  const { work } = session;
  const online = session.link.is === "online";
  if (work.is === "idle") return { phase: online || returning ? "waiting" : "connecting" };
  if (isUnfinished(work)) {
    const { task } = work.assignment;
    const round = task.type === "task" ? { round: task.round } : {};
    if (work.is === "training") return { phase: "training", ...round };
    return { phase: online ? "downloading" : "connecting", ...round };
  }
  if (work.is === "answered") return { phase: online ? "uploading" : "connecting" };
  const { round } = work.is === "saving" ? work.result : isUnmasked(work) ? work.task : work.report;
  return { phase: online || work.is === "saving" ? "uploading" : "connecting", round };
}
