/** The states of a session: `link`, the connection, and `work`, the task; each with the values that it needs. */

import type { Content, Question, Reply, Report, Task } from "../protocol/messages.ts";
import type { Wanted } from "./commands.ts";

export type Link =
  | { is: "offline" }
  /** The device is connected and has checked in. The welcome has not come. */
  | { is: "checking-in" }
  /** Welcomed. The interval is in seconds; `nextHeartbeat` by the owner's clock. */
  | { is: "online"; heartbeatInterval: number; nextHeartbeat: number; chunkBytes: number }
  /** Close was commanded; whatever still arrives is ignored. */
  | { is: "closing" };

/** A task that is not trained, or a question that is not answered, yet. */
export interface Assignment {
  readonly task: Task | Question;
  /** When the result must have arrived, by the owner's clock. */
  readonly deadline: number;
  /** The place of each content that arrived to its last byte; twice where its SHA-256 was wrong the first time. */
  readonly arrived: readonly string[];
}

/** The first of the wanted contents was asked for. */
export interface Fetching {
  is: "fetching";
  assignment: Assignment;
  wanted: readonly [Wanted, ...Wanted[]];
  /** The coordinator was told that it may name a URL. */
  http: boolean;
  /** The answer. */
  content: Content | null;
  /** Where the next chunk begins. */
  end: number;
}

/** The task is not trained, or the question is not answered, yet. */
export type Unfinished =
  /** The device waits to know which contents are lacking; or to be online, or for an earlier training to end. */
  | { is: "locating"; assignment: Assignment }
  | Fetching
  /** The first of the wanted contents is complete, and its hash is being checked. */
  | { is: "storing"; assignment: Assignment; wanted: readonly [Wanted, ...Wanted[]] }
  | { is: "training"; assignment: Assignment };

/** The update of a task with a `least_factor` is durable, and not masked. */
export type Unmasked =
  /** The device says so on each connection, until it is told what the update's staleness leaves of it. */
  | { is: "unweighed"; task: Task }
  /** It was told, and the masked update is being made durable. */
  | { is: "masking"; task: Task };

/** The update is durable. `reportedAgain`: a second time, since other bytes arrived the first time. */
export type Finished =
  /** It is reported as soon as the device is online. Its upload is not granted. */
  | { is: "holding"; report: Report; reportedAgain: boolean }
  | { is: "uploading"; report: Report; reportedAgain: boolean; transfer: number }
  /** All chunks were sent. The acknowledgement has not come. */
  | { is: "sent"; report: Report; reportedAgain: boolean; transfer: number };

export type Work =
  | { is: "idle" }
  | Unfinished
  /** The result is sent on each connection until it is answered. It is not durable. */
  | { is: "answered"; message: Reply }
  /** The task is trained; its update is being made durable. */
  | { is: "saving"; result: Report | Task }
  | Unmasked
  | Finished;

export function isUnfinished(work: Work): work is Unfinished {
  return work.is === "locating" || work.is === "fetching" || work.is === "storing" || work.is === "training";
}

export function isFinished(work: Work): work is Finished {
  return work.is === "holding" || work.is === "uploading" || work.is === "sent";
}

export function isUnmasked(work: Work): work is Unmasked {
  return work.is === "unweighed" || work.is === "masking";
}

/** The task that the device works on or whose result it holds. */
export function taskOf(work: Work): string | null {
  if (work.is === "idle") return null;
  if (isUnfinished(work)) return work.assignment.task.task;
  if (isUnmasked(work)) return work.task.task;
  if (work.is === "saving") return work.result.task;
  return work.is === "answered" ? work.message.task : work.report.task;
}

/** The task or question that the device was given, where it is still known. */
export function givenTask(work: Work): Task | Question | null {
  if (isUnfinished(work)) return work.assignment.task;
  return isUnmasked(work) ? work.task : null;
}
