/**
 * The device's side of the conversation, without I/O: events in, commands out.
 *
 * A `Session` opens no socket and no store, starts no work, reads no clock and draws no random number. Its owner (the
 * driver, or a test) tells it what happened, and carries out the commands with which it answers, in order. Times are
 * seconds on any clock that never goes back. Two states describe the session: `link`, the connection, and `work`, the
 * task. Work outlives the connection: training goes on while the device is offline, and what is finished is reported
 * later.
 *
 * A well-behaved coordinator can send a message late or twice: the session ignores such a message with a note. A message
 * that breaks the protocol closes the connection; the work stays, and the owner connects again after a back-off that
 * grows with `faults`.
 */

import { FAMILIES, MASKED_NAMES } from "../protocol/encodings.ts";
import { clip, ProtocolError } from "../protocol/errors.ts";
import { CHUNK_BYTES, unpackChunk } from "../protocol/frames.ts";
import {
  type CheckIn,
  type Content,
  type Failed,
  type FailureCode,
  type FromCoordinator,
  type FromDevice,
  type Grant,
  OLDEST_PROTOCOL_VERSION,
  PROTOCOL_VERSION,
  type Question,
  type Refused,
  type Reply,
  type Report,
  readFromCoordinator,
  type Signed,
  type Task,
  type Trust,
  type Waiting,
  type Weighing,
  type Welcome,
} from "../protocol/messages.ts";
import { signedBytes } from "../protocol/signing.ts";
import { PRIVACY, unsupported } from "./abilities.ts";
import type { Command, Wanted } from "./commands.ts";
import { whyNotFrom } from "./http_sources.ts";
import { factorRefusal, type GivenBack, type SecureDemands, secureRefusal, toldOfFailure } from "./secure_tasks.ts";
import {
  type Fetching,
  givenTask,
  isFinished,
  isUnfinished,
  isUnmasked,
  type Link,
  taskOf,
  type Unfinished,
  type Work,
} from "./states.ts";
import { messageIn, strange, WRONG_SIGNATURE } from "./trust.ts";

/** Seconds to wait for an answer to a check-in, a fetch or a finished upload before the connection is closed. And seconds
 * in which nothing is heard, after which the device asks whether the coordinator is still there. */
export const PATIENCE = 60;
/** Heartbeats are sent at this part of the interval that the coordinator allows. */
const BEAT = 0.8;
/** After this many of the intervals that the coordinator allows, it has ended a silent connection (PROTOCOL.md, 9). */
const SILENT_HEARTBEATS = 3;
/** Part of the deadline that is kept for the upload, and the most seconds it can be. */
const UPLOAD_MARGIN = { part: 0.1, most: 60 };
/** Seconds, about, until the device checks in again with a coordinator that speaks another version of the protocol. */
const VERSION_WAIT = 600;
/** Bytes that are asked for at a time: what arrives waits in memory until it is stored, and a page cannot hold it back. */
export const PART = 8 * 2 ** 20;
/** Bytes that an attempt by HTTP must bring, for another to follow. */
const HTTP_PROGRESS = 2 ** 16;
/** Seconds for which all is fetched by the WebSocket after HTTP did not work. */
const HTTP_REST = 600;
/** How often one content may arrive for a task: a second time where its SHA-256 was wrong the first time. */
const MAX_ARRIVALS = 2;

/** What a device says of itself at a check-in, beside its name. What is left out is not known. */
export type Statement = Partial<
  Pick<CheckIn, "runtime" | "memory" | "tags" | "tier" | "charging" | "network" | "models" | "challenge">
>;

/** A content, and its bytes. */
export interface Known {
  readonly sha256: string;
  readonly size: number;
}

export interface SessionOptions {
  readonly software?: string;
  /** The algorithms that the device can do beside `plain`. */
  readonly algorithms?: readonly string[];
  /** The kinds of questions that it can answer. */
  readonly exchanges?: readonly string[];
  /** An update saved by an earlier process; its task, where it is not masked yet. */
  readonly held?: Report | Task | null;
  /** What the device's owner demands of secure aggregation. */
  readonly demands?: SecureDemands;
  /** The public keys that the device trusts: it then does only tasks that one of them signed. Empty: any task. */
  readonly trusted?: readonly string[];
  /** Whether the session ends when the coordinator says that the training is finished. */
  readonly untilFinished?: boolean;
  /** The hosts from which contents are fetched by HTTP. Empty: none is. */
  readonly httpHosts?: ReadonlySet<string>;
}

export class Session {
  readonly device: string;
  readonly examples: number;
  link: Link = { is: "offline" };
  work: Work;
  /** The public keys that the device trusts. Empty: it does any task. */
  trusted: readonly string[];
  /** The task whose training or saving has not ended, wanted or not. There is never a second. */
  runningTask: string | null = null;
  /** Failed tasks and broken protocol since the last accepted update. */
  faults = 0;
  /** Why the last task failed on this device. null: none did since the last result that was accepted. */
  failed: string | null = null;
  /** Updates that were accepted, and their bytes. */
  accepted = 0;
  acceptedBytes = 0;
  stopping = false;
  /** The coordinator said that the training is finished, and `untilFinished` is set. */
  finished = false;
  /** Why the device cannot go on at all. */
  error: Error | null = null;
  /** A content that the coordinator should have: its owner sets it. A fetch of none of its bytes is answered with little,
   * which tells a quiet coordinator from a connection that died unseen: a browser cannot ping. */
  known: Known | null = null;
  #options: SessionOptions;
  readonly #demands: SecureDemands;
  /** How far training was at the last `tick`. */
  #steps = 0;
  /** When the last frame arrived, or the device last began to wait for an answer. */
  #lastProgress = 0;
  /** The task that ended on this connection, or whose failure is not sent yet. It is not begun again. */
  #endedTask: string | null = null;
  /** It is sent with the next welcome. */
  #unsentFailure: Failed | null = null;
  /** What a signature on this connection must have, where the device trusts keys. */
  #challenge = "";
  /** The message whose signature is being checked. */
  #unverified: Signed | null = null;
  /** `known` was asked for, and nothing was heard since. */
  #asking = false;
  /** Until then all is fetched by the WebSocket: HTTP brought nothing, or wrong bytes. */
  #noHttpUntil = 0;

  constructor(device: string, examples: number, options: SessionOptions = {}) {
    this.device = device;
    this.examples = examples;
    this.#options = options;
    this.#demands = options.demands ?? {};
    this.trusted = options.trusted ?? [];
    this.work = options.held == null ? { is: "idle" } : held(options.held);
  }

  /** The task that the device works on or whose result it holds. */
  get task(): string | null {
    return taskOf(this.work);
  }

  /** Seconds of the owner's silence after which the coordinator has ended the connection. null: it is not online. */
  get silence(): number | null {
    return this.link.is === "online" ? (SILENT_HEARTBEATS / BEAT) * this.link.heartbeatInterval : null;
  }

  /** The session was to stop, and nothing is left to be done. */
  get over(): boolean {
    return this.stopping && this.link.is === "offline" && this.runningTask === null;
  }

  // The connection

  /** The connection is open. `stated`: what the device is now. */
  connected(now: number, stated: Statement = {}): Command[] {
    this.link = { is: "checking-in" };
    this.#challenge = stated.challenge ?? "";
    this.#lastProgress = now;
    if (this.stopping) return this.#close("stopping");
    const work = this.work;
    const finished = isFinished(work) ? work.report : isUnmasked(work) ? work.task : null;
    const held = finished === null ? null : { task: finished.task, round: finished.round };
    const required = this.#demands.require === true;
    return [
      send({
        type: "check-in",
        protocol: OLDEST_PROTOCOL_VERSION,
        newest_protocol: PROTOCOL_VERSION,
        device: this.device,
        examples: this.examples,
        runtime: "",
        software: this.#options.software ?? "",
        held,
        memory: null,
        tags: [],
        tier: null,
        charging: null,
        network: null,
        models: [],
        challenge: null,
        error: "",
        wants: "tasks",
        functions: [],
        ...stated,
        trusts: this.trusted,
        exchanges: required ? [] : (this.#options.exchanges ?? []), // an answer tells of the data
        algorithms: this.#options.algorithms ?? [],
        encodings: [...FAMILIES, ...MASKED_NAMES],
        privacy: required ? [...PRIVACY, "secure-required"] : PRIVACY,
      }),
    ];
  }

  /** The connection is gone, or could not be opened. */
  disconnected(): Command[] {
    this.#interruptTransfer();
    this.link = { is: "offline" };
    this.#unverified = null;
    this.#asking = false;
    this.#endedTask = this.#unsentFailure?.task ?? null;
    return [];
  }

  /** A text frame arrived. */
  received(frame: string, now: number): Command[] {
    return this.#guarded(now, () => this.#handle(readFromCoordinator(frame), now));
  }

  /** A binary frame arrived. */
  receivedChunk(frame: Uint8Array, now: number): Command[] {
    return this.#guarded(now, () => {
      if (this.link.is === "checking-in") throw new ProtocolError("out-of-turn", "a chunk came before the welcome");
      const chunk = unpackChunk(frame);
      const work = this.work;
      if (work.is !== "fetching" || chunk.transfer !== work.content?.transfer || work.content.url !== null) {
        return []; // the rest of an earlier fetch, whose task was cancelled
      }
      const wanted = work.wanted[0];
      const end = chunk.offset + chunk.payload.length;
      if (chunk.offset !== work.end) {
        const text = `a chunk of ${wanted.name} begins at ${chunk.offset}; expected ${work.end}`;
        throw new ProtocolError("wrong-offset", text);
      }
      if (end > work.content.size) {
        const text = `a chunk of ${wanted.name} ends behind its ${work.content.size} bytes`;
        throw new ProtocolError("wrong-length", text);
      }
      const stored = this.#arrived(work, chunk.payload);
      if (end === work.content.size || work.content.end === null || end < work.content.end) return stored;
      // The next part is asked for when this one is stored: commands are carried out one after the other.
      return [...stored, this.#ask(work, [{ ...wanted, have: end }, ...work.wanted.slice(1)], now)];
    });
  }

  /** The next bytes of what is fetched are here. */
  #arrived(work: Fetching, payload: Uint8Array): Command[] {
    const end = work.end + payload.length;
    this.work = { ...work, end };
    const store: Command = { do: "store-chunk", wanted: work.wanted[0], offset: work.end, payload };
    return end === work.content?.size ? [store, ...this.#store(work, work.wanted)] : [store];
  }

  /** Bytes of a content came by HTTP: no more than it has. */
  httpBytes(sha256: string, offset: number, payload: Uint8Array, now: number): Command[] {
    const work = this.work;
    if (work.is !== "fetching" || work.content?.sha256 !== sha256 || work.end !== offset) return []; // an earlier fetch
    this.#lastProgress = now;
    return this.#arrived(work, payload);
  }

  /** HTTP brought no more bytes of a content: ask again, which gives another URL. Where there were hardly any, go on by the
   * WebSocket. */
  httpEnded(sha256: string, why: string, now: number): Command[] {
    const work = this.work;
    if (work.is !== "fetching" || work.content?.sha256 !== sha256 || work.content.url === null) return [];
    const [first, ...others] = work.wanted;
    const wanted = [{ ...first, have: work.end }, ...others] as const;
    if (work.end - first.have < HTTP_PROGRESS) return this.#withoutHttp(work, wanted, why, now);
    return [note(`${first.name} goes on from byte ${work.end}: ${why}`), ...this.#fetch(work, wanted, now)];
  }

  #withoutHttp(work: Fetching, wanted: readonly [Wanted, ...Wanted[]], why: string, now: number): Command[] {
    this.#noHttpUntil = now + HTTP_REST;
    const text = `${wanted[0].name} is fetched by the WebSocket, and not by HTTP: ${why}`;
    return [note(text, true), ...this.#fetch(work, wanted, now)];
  }

  #guarded(now: number, handle: () => Command[]): Command[] {
    if (this.link.is === "offline" || this.link.is === "closing") return [];
    this.#lastProgress = now;
    this.#asking = false;
    try {
      return handle();
    } catch (error) {
      if (!(error instanceof ProtocolError)) throw error;
      return this.#closeForFault(`the coordinator broke the protocol: ${error.message}`, 1002);
    }
  }

  // Answers to commands

  /** The signature was checked. */
  verified(signed: Signed, good: boolean, now: number): Command[] {
    if (signed !== this.#unverified) return [];
    this.#unverified = null;
    return this.#guarded(now, () => this.#believe(messageIn(signed), good ? null : WRONG_SIGNATURE, now));
  }

  /** What the task lacks was looked up. Its training starts where nothing is lacking. */
  located(task: string, lacking: readonly Wanted[], now: number): Command[] {
    const work = this.work;
    if (work.is !== "locating" || this.task !== task) return [];
    const [first, ...others] = lacking;
    if (first !== undefined) return this.#fetch(work, [first, ...others], now);
    if (this.runningTask !== null) return []; // the training that this task replaced has not ended; its end asks again
    const { task: given, deadline } = work.assignment;
    let seconds = deadline - now - Math.min(UPLOAD_MARGIN.part * given.deadline, UPLOAD_MARGIN.most);
    if (given.type === "task" && given.time_budget !== null) seconds = Math.min(seconds, given.time_budget);
    if (seconds <= 0) {
      return this.#failTask("out-of-time", "the bundle and the model came too late to train before the deadline");
    }
    this.work = { is: "training", assignment: work.assignment };
    this.runningTask = task;
    this.#steps = 0;
    if (given.type === "task") return [{ do: "start-training", task: given, seconds }];
    return [{ do: "start-answer", task: given, seconds }];
  }

  /** The task's bundle cannot be used here. */
  unusable(task: string, text: string, code: FailureCode = "bad-bundle"): Command[] {
    return this.work.is === "locating" && this.task === task ? this.#failTask(code, text) : [];
  }

  /** A complete content was filed (`good`), or deleted because its hash was another. */
  stored(sha256: string, good: boolean, now: number): Command[] {
    const work = this.work;
    if (work.is !== "storing" || work.wanted[0].sha256 !== sha256) return [];
    const [wanted, next, ...others] = work.wanted;
    const rest = next === undefined ? [] : [next, ...others];
    if (!good && wanted.instead !== undefined) {
      const text = `${wanted.name} does not give the vector that it should`;
      return [note(text, true), ...this.#fetch(work, [wanted.instead, ...rest], now)];
    }
    if (!good) {
      this.#noHttpUntil = now + HTTP_REST; // a cache may have other bytes
      const text = `${wanted.name} arrived with another SHA-256 than ${sha256}`;
      return [note(text, true), ...this.#fetch(work, [{ ...wanted, have: 0 }, ...rest], now)];
    }
    if (next !== undefined) return this.#fetch(work, [next, ...others], now);
    this.work = { is: "locating", assignment: work.assignment };
    return this.#locate();
  }

  /** Training ended well. The report describes its update; a task in its place: the update is not masked yet. */
  trained(result: Report | Task): Command[] {
    if (this.work.is !== "training" || this.task !== result.task) return this.ended(result.task);
    this.work = { is: "saving", result };
    return [{ do: "save-update", result }];
  }

  /** The masked update is durable, in place of the unmasked one. Only now may anything of it be sent. */
  masked(report: Report): Command[] {
    this.runningTask = null;
    if (this.work.is !== "masking" || this.task !== report.task) return this.#dropSaved(report.task);
    this.work = held(report);
    return this.#sendIfOnline(report);
  }

  /** The question is answered. */
  answered(message: Reply): Command[] {
    if (this.work.is !== "training" || this.task !== message.task) return this.ended(message.task);
    this.work = { is: "answered", message };
    this.runningTask = null;
    return this.#sendIfOnline(message);
  }

  /** The update is durable. Only now may it be reported. */
  saved(task: string): Command[] {
    this.runningTask = null;
    if (this.work.is !== "saving" || this.task !== task) return this.#dropSaved(task);
    const { result } = this.work;
    this.work = held(result);
    return this.#sendIfOnline(result.type === "report" ? result : { type: "finished", task });
  }

  /** Delete what was saved of a task that the device was told to drop meanwhile. */
  #dropSaved(task: string): Command[] {
    return [{ do: "drop-update", task }, ...this.#locate()];
  }

  /** Training, saving or masking ended without an update: it was stopped (`code` null) or failed. */
  ended(task: string, code: FailureCode | null = null, text = ""): Command[] {
    this.runningTask = null;
    if (!["training", "saving", "masking"].includes(this.work.is) || this.task !== task) return this.#locate();
    return this.#failTask(code ?? "stopping", text);
  }

  /** All chunks of the upload under this transfer number were sent. */
  updateSent(transfer: number, now: number): Command[] {
    const work = this.work;
    if (work.is !== "uploading" || transfer !== work.transfer) return [];
    this.work = { ...work, is: "sent" };
    this.#lastProgress = now;
    return [send({ type: "uploaded", task: work.report.task })];
  }

  // Time and the owner

  /** When `tick` is wanted. null: not before something happens. */
  due(): number | null {
    const times: number[] = [];
    if (this.link.is === "online") times.push(this.link.nextHeartbeat);
    if (this.#awaitsAnswer() || this.#canAsk()) times.push(this.#lastProgress + PATIENCE);
    if (this.work.is === "locating" || this.work.is === "fetching") times.push(this.work.assignment.deadline);
    return times.length > 0 ? Math.min(...times) : null;
  }

  /** Time passed; `steps` is how far training is: batches evaluated, and steps. */
  tick(now: number, steps = 0): Command[] {
    const work = this.work;
    this.#steps = work.is === "idle" || (isUnfinished(work) && work.is !== "training") ? 0 : steps;
    if ((work.is === "locating" || work.is === "fetching") && now >= work.assignment.deadline) {
      return this.#failTask("out-of-time", "the deadline passed before training began");
    }
    if (this.#awaitsAnswer() && now >= this.#lastProgress + PATIENCE) return this.#close(`no answer for ${PATIENCE} s`);
    if (this.link.is === "online" && now >= this.link.nextHeartbeat) {
      this.link = { ...this.link, nextHeartbeat: now + this.link.heartbeatInterval };
      return [this.#heartbeat()];
    }
    if (this.known !== null && this.#canAsk() && now >= this.#lastProgress + PATIENCE) {
      this.#asking = true;
      this.#lastProgress = now;
      return [
        send({
          type: "fetch",
          sha256: this.known.sha256,
          offset: this.known.size,
          end: null,
          http: false,
          selection: null,
        }),
      ];
    }
    return [];
  }

  /** The owner wants to end, or to pause for this reason. An unfinished task is given back; a finished update stays
   * saved. */
  stop(paused: string | null = null): Command[] {
    this.stopping = true;
    const reason = paused === null ? "stopping" : `paused: ${paused}`;
    const task = this.task;
    if (task === null || !isUnfinished(this.work)) return this.#close(reason);
    const code = paused === null ? "stopping" : "paused";
    const failed: Failed = { type: "failed", task, code, text: clip(paused ?? "the device is stopping") };
    return [...this.#sendIfOnline(failed), ...this.#dropTask(), ...this.#close(reason)];
  }

  /** The device cannot go on at all (its data do not fit, its store is full): say so and end with `error`. */
  abandon(error: Error, code: FailureCode): Command[] {
    this.error = error;
    this.stopping = true;
    const { is } = this.work;
    if (isUnfinished(this.work) || is === "saving" || is === "masking") return this.#failTask(code, error.message);
    return this.#close(error.message);
  }

  // Messages

  #handle(message: FromCoordinator, now: number): Command[] {
    if (this.link.is === "checking-in" && !["welcome", "come-back", "refused"].includes(message.type)) {
      throw new ProtocolError("out-of-turn", `${message.type} came before the welcome`);
    }
    switch (message.type) {
      case "welcome":
        return this.#welcome(message, now);
      case "come-back":
        if (message.reason === "finished" && this.#options.untilFinished === true) {
          this.finished = this.stopping = true;
          return [...this.#dropUnfinishedTask(), ...this.#close("the training is finished", message.after)];
        }
        return this.#close(`told to come back in ${message.after} s (${message.reason})`, message.after);
      case "task":
      case "question":
        if (this.trusted.length === 0) return this.#assign(message, now);
        return this.#distrust(message, "it is not signed, and this device does only what is");
      case "signed":
        return this.#open(message, now);
      case "trust":
        throw new ProtocolError("out-of-turn", "keys to trust came without a signature");
      case "content":
        return this.#receive(message, now);
      case "grant":
        return this.#upload(message);
      case "waiting":
        return this.#wait(message);
      case "weighing":
        return this.#mask(message);
      case "accepted": {
        this.#checkReported(message);
        if (message.task !== this.task) return ignored(message, message.task);
        this.faults = 0;
        this.failed = null;
        const what = this.work.is === "answered" ? "answer" : "update";
        if (isFinished(this.work)) {
          this.accepted += 1;
          this.acceptedBytes += this.work.report.parts.reduce((bytes, part) => bytes + part.size, 0);
        }
        return [note(`task ${message.task}: ${what} accepted`), ...this.#dropTask()];
      }
      case "cancel":
        if (message.task !== this.task) return ignored(message, message.task);
        return [note(`task ${message.task} is cancelled: ${message.text || message.code}`), ...this.#dropTask()];
      case "refused":
        return this.#refused(message, now);
    }
  }

  #welcome(message: Welcome, now: number): Command[] {
    if (this.link.is === "online") return [note("a second welcome is ignored")];
    if (message.protocol < OLDEST_PROTOCOL_VERSION || message.protocol > PROTOCOL_VERSION) {
      const spoken = `versions ${OLDEST_PROTOCOL_VERSION} to ${PROTOCOL_VERSION}`;
      const text = `the coordinator chose version ${message.protocol} of the protocol; this device speaks ${spoken}`;
      throw new ProtocolError("bad-version", text);
    }
    const heartbeatInterval = Math.max(BEAT * message.heartbeat, 0.01);
    const chunkBytes = Math.min(message.chunk_bytes, CHUNK_BYTES);
    this.link = { is: "online", heartbeatInterval, nextHeartbeat: now + heartbeatInterval, chunkBytes };
    const commands = [note(`checked in with ${message.coordinator || "the coordinator"} as ${this.device}`)];
    if (message.ineligible) commands.push(note(`there will be no task for this device: ${message.ineligible}`, true));
    if (message.warning) commands.push(note(`the coordinator warns: ${message.warning}`, true));
    if (this.#unsentFailure !== null) commands.push(send(this.#unsentFailure));
    this.#unsentFailure = null;
    if (this.work.is === "holding") commands.push(send(this.work.report));
    else if (this.work.is === "unweighed") commands.push(send({ type: "finished", task: this.work.task.task }));
    else if (this.work.is === "answered") commands.push(send(this.work.message));
    else if (this.task !== null) commands.push(this.#heartbeat()); // so that the lease is known to be alive
    return [...commands, ...this.#locate()];
  }

  /** Have the signature checked, if the key is one that counts. */
  #open(signed: Signed, now: number): Command[] {
    if (this.trusted.length === 0) {
      throw new ProtocolError("out-of-turn", "a signed message came, and this device has no keys to check it with");
    }
    const message = messageIn(signed);
    const why = strange(signed.key, this.trusted);
    if (why !== null) return this.#believe(message, why, now);
    this.#unverified = signed;
    return [{ do: "verify", signed, content: signedBytes(this.#challenge, this.device, signed.message) }];
  }

  /** Do what a signed message says, unless there is a reason (`why`) not to believe it. */
  #believe(message: Task | Question | Trust, why: string | null, now: number): Command[] {
    if (message.type !== "trust") return why === null ? this.#assign(message, now) : this.#distrust(message, why);
    if (why !== null) return this.#closeForFault(`new keys to trust are refused: ${why}`);
    this.trusted = message.keys;
    return [
      note(`the coordinator's keys are now ${message.keys.join(", ")}`),
      { do: "save-trusted", keys: this.trusted },
    ];
  }

  /** Give back a task that is not to be believed. What the device works on stays as it is. */
  #distrust(task: Task | Question, why: string): Command[] {
    const text = clip(`task ${task.task} is not trained: ${why}`);
    const named = task.task === this.task || task.task === this.#endedTask; // nobody shall end the real task of this name
    const failed: Command[] = named ? [] : [send({ type: "failed", task: task.task, code: "untrusted", text })];
    return [note(text, true), ...failed, ...this.#closeForFault("a task is not trusted")];
  }

  #assign(task: Task | Question, now: number): Command[] {
    const deadline = now + task.deadline;
    if (task.task === this.task || task.task === this.#endedTask) {
      if (isUnfinished(this.work) && task.task === this.task) {
        // A coordinator that was restarted gives the round its time again.
        this.work = { ...this.work, assignment: { ...this.work.assignment, deadline } };
      }
      return [note(`task ${task.task} was given again; the device has it`)];
    }
    const commands: Command[] = [];
    if (this.task !== null) {
      // A coordinator that gives another task no longer waits for the first (it lost it in a restart).
      commands.push(note(`task ${this.task} is dropped for task ${task.task}`, true), ...this.#dropTask());
    }
    this.work = { is: "locating", assignment: { task, deadline, arrived: [] } };
    const what = task.type === "task" ? `round ${task.round}, ${task.epochs} epochs` : task.kind;
    commands.push(note(`task ${task.task}: ${what}, ${task.deadline} s to the deadline`));
    const why = this.#whyNot(task);
    return [...commands, ...(why === null ? this.#locate() : this.#failTask(why.code, why.text))];
  }

  /** Return why the device does not do a task; null if it does. */
  #whyNot(task: Task | Question): GivenBack | null {
    const refused = secureRefusal(this.#demands, task);
    if (refused !== null) return refused;
    const lacking = unsupported(task, this.#options.algorithms ?? [], this.#options.exchanges ?? []);
    return lacking === null ? null : { code: "unsupported", text: lacking };
  }

  /** Expect the chunks of the content that was asked for, or fetch it where it is. */
  #receive(content: Content, now: number): Command[] {
    const work = this.work;
    // The answer to an earlier fetch, whose task was cancelled, may still come; the later fetch replaces it.
    if (work.is !== "fetching" || content.sha256 !== work.wanted[0].sha256) {
      if (content.sha256 === this.known?.sha256) return []; // the coordinator is there
      return [note(`content ${content.sha256} is not awaited; ignored`)];
    }
    const wanted = work.wanted[0];
    if (content.offset !== wanted.have) {
      return [note(`${wanted.name} from byte ${content.offset} is ignored; ${wanted.have} was asked for`)];
    }
    if (content.size > wanted.limit || (wanted.size !== null && content.size !== wanted.size)) {
      const expected = wanted.size === null ? `at most ${wanted.limit}` : `${wanted.size}`;
      return this.#failTask("bad-bundle", `${wanted.name} has ${content.size} bytes; expected ${expected}`);
    }
    if (content.offset > content.size) {
      throw new ProtocolError("wrong-offset", `${wanted.name} begins at ${content.offset}, behind its end`);
    }
    const fetching = { ...work, content, end: content.offset };
    this.work = fetching;
    const { url, size, offset: begin } = content;
    if (begin === size) return this.#store(work, work.wanted);
    if (url === null) return [];
    if (!work.http) throw new ProtocolError("out-of-turn", `a URL came for ${wanted.name}, and none was wanted`);
    const why = whyNotFrom(this.#options.httpHosts ?? new Set(), url, content.sha256);
    if (why !== null) return this.#withoutHttp(fetching, work.wanted, why, now);
    return [{ do: "fetch-by-http", wanted, url, begin, size }];
  }

  /** Send the update from the grant's offset on. */
  #upload(grant: Grant): Command[] {
    this.#checkReported(grant);
    const work = this.work;
    if (!isFinished(work) || grant.task !== work.report.task || this.link.is !== "online") {
      return ignored(grant, grant.task);
    }
    if (work.is !== "holding" && grant.transfer === work.transfer) {
      return [note(`task ${grant.task}: a second grant ${grant.transfer} is ignored`)];
    }
    const { report, reportedAgain } = work;
    const size = report.parts.reduce((sum, part) => sum + part.size, 0);
    const { transfer, offset } = grant;
    if (offset > size) {
      const text = `the grant for task ${grant.task} begins at ${offset}; the update has ${size} bytes`;
      throw new ProtocolError("wrong-offset", text);
    }
    this.work = { is: "uploading", report, reportedAgain, transfer };
    const text = `task ${grant.task}: uploading ${size - offset} bytes from ${offset}`;
    return [note(text), { do: "send-update", report, transfer, offset, chunkBytes: this.link.chunkBytes }];
  }

  /** The staleness of the finished update is known. From now on it does not change. */
  #mask({ task, factor, type }: Weighing): Command[] {
    const work = this.work;
    if (work.is !== "unweighed" || task !== this.task) return ignored({ type }, task);
    const why = factorRefusal(work.task.secure?.least_factor ?? 1, factor);
    if (why !== null) return this.#failTask(why.code, why.text);
    this.work = { is: "masking", task: work.task };
    this.runningTask = task;
    const text = `task ${task}: the update counts for ${factor} of itself; it is masked now`;
    return [note(text), { do: "mask-update", task: work.task, factor }];
  }

  /** A transfer lost its turn, or has none yet. For a fetch, the message alone starts the patience again. */
  #wait(waiting: Waiting): Command[] {
    if (waiting.task === null) return [note("what is fetched waits for its turn")];
    const work = this.work;
    if ((work.is !== "uploading" && work.is !== "sent") || waiting.task !== work.report.task) {
      return ignored(waiting, waiting.task);
    }
    // The report comes after the last chunk, so the next grant's offset counts all chunks.
    this.work = { is: "holding", report: work.report, reportedAgain: work.reportedAgain };
    return [note(`task ${waiting.task}: the upload waits for its turn`), { do: "stop-update" }, send(work.report)];
  }

  #refused(refused: Refused, now: number): Command[] {
    const said = `${refused.text} [${refused.code}]`;
    if (refused.code === "replaced" && refused.task === null && refused.sha256 === null) return this.#endReplaced(said);
    if (this.link.is === "checking-in") return this.#checkInRefused(refused, said);
    if (refused.sha256 !== null) return this.#contentRefused(refused, refused.sha256, said, now);
    if (refused.task !== null) return this.#taskRefused(refused, refused.task, said);
    return this.#closeForFault(`something was refused: ${said}`);
  }

  #checkInRefused(refused: Refused, said: string): Command[] {
    if (refused.code === "bad-version" && this.#options.untilFinished !== true) {
      // The coordinator may be given another version while nobody is near the device.
      const text = `the coordinator speaks another version of the protocol: ${refused.text}`;
      return [note(text, true), ...this.#close("another version of the protocol", VERSION_WAIT)];
    }
    if (["bad-version", "bad-message", "unknown-type", "too-large"].includes(refused.code)) {
      this.error = new ProtocolError(refused.code, `the coordinator refuses the check-in: ${refused.text}`);
      this.stopping = true;
    }
    return this.#closeForFault(`the check-in is refused: ${said}`);
  }

  #contentRefused(refused: Refused, sha256: string, said: string, now: number): Command[] {
    const work = this.work;
    if (work.is !== "fetching" || sha256 !== work.wanted[0].sha256) {
      if (sha256 === this.known?.sha256) this.known = null;
      return ignored(refused, sha256);
    }
    const [wanted, ...others] = work.wanted;
    if (refused.code === "wrong-offset" && wanted.have > 0) {
      const text = `${wanted.name} is fetched from its beginning: ${said}`;
      return [note(text, true), ...this.#fetch(work, [{ ...wanted, have: 0 }, ...others], now)];
    }
    if (wanted.instead !== undefined) {
      const text = `${wanted.name} cannot be had, so the whole content is fetched: ${said}`;
      return [note(text), ...this.#fetch(work, [wanted.instead, ...others], now)];
    }
    return this.#failTask("bad-bundle", `fetching ${wanted.name} was refused: ${said}`);
  }

  #taskRefused(refused: Refused, task: string, said: string): Command[] {
    const work = this.work;
    if (task !== this.task || refused.code === "duplicate") return ignored(refused, task);
    if (refused.code === "busy") return this.#close(`task ${task}: ${said}`);
    if (isFinished(work)) {
      const { report, reportedAgain } = work;
      if (refused.code === "wrong-offset") {
        this.work = { is: "holding", report, reportedAgain };
        return [note(`task ${task} waits for another grant: ${said}`, true), { do: "stop-update" }];
      }
      if ((refused.code === "wrong-hash" || refused.code === "wrong-length") && !reportedAgain) {
        this.work = { is: "holding", report, reportedAgain: true };
        return [note(`task ${task} is reported again: ${said}`, true), { do: "stop-update" }, send(report)];
      }
    }
    return [note(`task ${task} is forgotten: ${said}`, true), ...this.#dropTask()];
  }

  /** End the device. This is the session's only connection, so another process or tab speaks for the device, and has its
   * task. The two would replace each other for ever. */
  #endReplaced(said: string): Command[] {
    const text =
      `another process or tab connected to the coordinator as device ${this.device}, so this one ends (${said}). Each ` +
      "device needs a store of its own, which holds its name";
    this.error = new ProtocolError("replaced", text);
    this.stopping = true;
    return [...this.#dropUnfinishedTask(), ...this.#close("another process speaks for this device")];
  }

  #checkReported(message: { type: string; task: string }): void {
    const { is } = this.work;
    if (message.task === this.task && !isFinished(this.work) && is !== "answered" && is !== "unweighed") {
      const text = `${message.type} came for task ${message.task}, which was not reported (it is ${this.work.is})`;
      throw new ProtocolError("out-of-turn", text);
    }
  }

  // Shared steps

  #heartbeat(): Command {
    const { work } = this;
    const fetched = work.is === "fetching" && work.content !== null && work.content.url !== null ? work.end : 0;
    return send({ type: "heartbeat", task: this.task, steps: this.#steps, fetched });
  }

  /** Look up what is lacking, if that is the task's next step. */
  #locate(): Command[] {
    return this.work.is === "locating" ? [{ do: "locate", task: this.work.assignment.task }] : [];
  }

  /** Ask for the first wanted content. */
  #fetch(work: Unfinished, wanted: readonly [Wanted, ...Wanted[]], now: number): Command[] {
    const first = wanted[0];
    const { assignment } = work;
    if (assignment.arrived.filter((place) => place === first.place).length >= MAX_ARRIVALS) {
      return this.#failTask("bad-bundle", `${first.name} arrived twice with another SHA-256 than its name`);
    }
    if (first.have === first.size) return this.#store(work, wanted);
    if (this.link.is !== "online") {
      this.work = { is: "locating", assignment }; // the next welcome asks again
      return [];
    }
    const size = first.size === null ? "" : ` of ${first.size}`;
    return [
      note(`fetching ${first.name} (${first.sha256.slice(0, 12)}) from byte ${first.have}${size}`),
      this.#ask(work, wanted, now),
    ];
  }

  /** Ask for the next part of the first wanted content. */
  #ask({ assignment }: Unfinished, wanted: readonly [Wanted, ...Wanted[]], now: number): Command {
    const { sha256, have: offset, size, limit } = wanted[0];
    const http = (this.#options.httpHosts?.size ?? 0) > 0 && now >= this.#noHttpUntil;
    this.work = { is: "fetching", assignment, wanted, http, content: null, end: 0 };
    this.#lastProgress = now;
    const end = (size ?? limit) > offset + PART ? offset + PART : null;
    return send({ type: "fetch", sha256, offset, end, http, selection: null });
  }

  /** Have the first wanted content checked, all of whose bytes are there. */
  #store({ assignment }: Unfinished, wanted: readonly [Wanted, ...Wanted[]]): Command[] {
    const arrived = [...assignment.arrived, wanted[0].place];
    this.work = { is: "storing", assignment: { ...assignment, arrived }, wanted };
    return [{ do: "finish-content", wanted: wanted[0] }];
  }

  /** End the current task, whatever its state. */
  #dropTask(): Command[] {
    const work = this.work;
    this.#endedTask = this.task;
    this.work = { is: "idle" };
    // Training that has ended by itself needs no stop. An update being saved is dropped by `saved`, one being masked also by
    // `masked`.
    if (work.is === "fetching" && typeof work.content?.url === "string") return [{ do: "stop-http" }];
    if (work.is === "training" && this.runningTask !== null) return [{ do: "stop-training" }];
    return isFinished(work) || isUnmasked(work) ? [{ do: "drop-update", task: taskOf(work)! }] : [];
  }

  #dropUnfinishedTask(): Command[] {
    return isUnfinished(this.work) ? this.#dropTask() : [];
  }

  /** Give the task back to the coordinator, now or with the next welcome. */
  #failTask(code: FailureCode, said: string): Command[] {
    const task = this.task;
    if (task === null) throw new Error("no task can fail where there is none");
    const why = clip(said);
    const failed: Failed = { type: "failed", task, code, text: clip(toldOfFailure(givenTask(this.work), code, said)) };
    if (code !== "stopping") this.failed = why;
    const sent = this.#sendIfOnline(failed);
    this.#unsentFailure = sent.length > 0 ? null : failed;
    const text = `task ${task} failed: ${why} [${code}]`;
    return [note(text, true), ...sent, ...this.#dropTask(), ...this.#closeForFault(`task ${task} failed`)];
  }

  #sendIfOnline(message: FromDevice): Command[] {
    return this.link.is === "online" ? [send(message)] : [];
  }

  #closeForFault(reason: string, code: 1000 | 1002 = 1000): Command[] {
    this.faults += 1;
    return this.#close(reason, null, code);
  }

  #close(reason: string, after: number | null = null, code: 1000 | 1002 = 1000): Command[] {
    if (this.link.is === "offline" || this.link.is === "closing") return [];
    this.#interruptTransfer();
    this.link = { is: "closing" };
    return [{ do: "close", reason, after, code }];
  }

  /** Go back to where the next connection begins: a fetch at its partial content, an upload at its report. */
  #interruptTransfer(): void {
    const work = this.work;
    if (work.is === "fetching") this.work = { is: "locating", assignment: work.assignment };
    if (work.is === "uploading" || work.is === "sent") {
      this.work = { is: "holding", report: work.report, reportedAgain: work.reportedAgain };
    }
  }

  #awaitsAnswer(): boolean {
    return this.#asking || this.link.is === "checking-in" || this.work.is === "fetching" || this.work.is === "sent";
  }

  #canAsk(): boolean {
    return this.known !== null && this.link.is === "online" && this.work.is !== "uploading" && !this.#awaitsAnswer();
  }
}

/** Return the state in which an update is durable. */
function held(result: Report | Task): Work {
  return result.type === "report"
    ? { is: "holding", report: result, reportedAgain: false }
    : { is: "unweighed", task: result };
}

function send(message: FromDevice): Command {
  return { do: "send", message };
}

function note(text: string, warning = false): Command {
  return { do: "note", text, warning };
}

function ignored(message: { readonly type: FromCoordinator["type"] }, about: string): Command[] {
  return [note(`${message.type} about ${about.slice(0, 64)} is ignored: it is not what the device works on`)];
}
