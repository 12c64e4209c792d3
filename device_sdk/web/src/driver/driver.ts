/** Carries a session's commands out, one after the other, and tells the session what came of them. */

import { isOffline, onNetwork } from "../life/network.ts";
import { activityOf, type DeviceState } from "../life/state.ts";
import { ProtocolError } from "../protocol/errors.ts";
import { contentOf } from "../protocol/exchanges.ts";
import { toHex } from "../protocol/hex.ts";
import { encode, type FailureCode, type Question, type Task } from "../protocol/messages.ts";
import { StoppedError } from "../runtimes/errors.ts";
import type { MaskedTask } from "../secure/task_terms.ts";
import type { Command, Wanted } from "../session/commands.ts";
import type { Session, Statement } from "../session/session.ts";
import type { Contents } from "../storage/contents.ts";
import { StoreError } from "../storage/errors.ts";
import type { Enrolment } from "../storage/identity.ts";
import type { FinishedUpdate, Outbox } from "../storage/outbox.ts";
import { inOneLine, TrainingError } from "../training/errors.ts";
import type { Masker } from "../training/masker.ts";
import type { Trainer } from "../training/trainer.ts";
import { Connection } from "./connection.ts";
import { httpParts } from "./http_fetch.ts";
import type { Verify } from "./signatures.ts";
import { secondsToWait, type Timing } from "./timing.ts";

/** Seconds: a thread that stood still for less was busy, not suspended. */
const SUSPENDED = 5;

/** Messages that bring the coordinator a result of the device's data, or complete one. */
const RESULTS: ReadonlySet<string> = new Set(["report", "reply", "uploaded"]);

/** Tells the session what happened. Returns its commands. */
type Event = () => Command[];
export type Log = (text: string, level: "info" | "warning") => void;

export interface Parts {
  readonly url: string;
  readonly timing: Timing;
  readonly session: Session;
  readonly enrolment: Enrolment;
  readonly contents: Contents;
  readonly outbox: Outbox;
  readonly trainer: Trainer;
  readonly masker: Masker;
  readonly verify: Verify;
  readonly saveTrusted: (keys: readonly string[]) => Promise<void>;
  /** Whether the device may go on. Asked before it connects, begins to compute and sends a result; where it may not, the
   * owner ends the session. */
  readonly allowed: () => Promise<boolean>;
  /** Called after whatever may have changed what the device does. */
  readonly changed: () => void;
  /** What the device states at a check-in, beside the models that it has. */
  readonly state: () => Statement | Promise<Statement>;
  readonly log: Log;
}

/** One run of a device. Events wait in a queue. The commands with which the session answers an event are carried out
 * before the next event; what takes long is done by a job, whose end is an event. */
export class Driver {
  readonly #parts: Parts;
  readonly #events: (() => Event | Promise<Event>)[] = [];
  #wake: () => void = () => {};
  #connection: Connection | null = null;
  #finished: FinishedUpdate | null = null;
  /** The number of the last upload, or of its end: an upload with another number is stopped. */
  #upload = 0;
  /** Stops what is fetched by HTTP. */
  #http = new AbortController();
  /** The end of the last job that looked up or filed contents: a lookup deletes what only the task before needed. */
  #cache: Promise<unknown> = Promise.resolve();
  /** Connections in a row on which the device was not welcomed. */
  #failures = 0;
  #welcomed = false;
  #comeBackAfter: number | null = null;
  #connectAt: number | null = 0;
  #error: unknown = null;
  /** Why the device is not connected. */
  #offlineFor = "";

  constructor(parts: Parts) {
    this.#parts = parts;
  }

  /** What the device does now. */
  get activity(): Pick<DeviceState, "phase" | "round" | "why"> {
    const { session } = this.#parts;
    const why = session.link.is === "online" || this.#offlineFor === "" ? {} : { why: this.#offlineFor };
    return { ...activityOf(session, this.#comeBackAfter !== null), ...why };
  }

  /** Let the session know. */
  post(event: Event): void {
    this.#events.push(() => event);
    this.#wake();
  }

  /** Run until the session is over. Rejects with its error, and with one that nobody expected. */
  async run(): Promise<void> {
    const { session, trainer } = this.#parts;
    const unlisten = onNetwork(() => this.#networkIsBack());
    try {
      while (!session.over && this.#error === null) {
        this.#parts.changed();
        const event = this.#events.shift();
        if (event !== undefined) await this.#carryOut((await event())());
        else if ((session.due() ?? Number.POSITIVE_INFINITY) <= now()) {
          await this.#carryOut(session.tick(now(), trainer.batches));
        } else if (this.#connectAt !== null && this.#connectAt <= now() && !session.stopping) await this.#connect();
        else this.#notice(await this.#sleep());
      }
    } finally {
      unlisten();
      trainer.halt = true;
      this.#upload += 1;
      this.#http.abort();
      this.#connection?.leave("the device ends");
    }
    const error = this.#error ?? session.error;
    if (error !== null) throw error;
  }

  /** Wait for an event, or until something is due. Returns for how many seconds the thread stood still beyond that: the
   * page was frozen, or the device slept, in which some browsers' monotonic clock stands still too. */
  async #sleep(): Promise<number> {
    const { session } = this.#parts;
    const times = [session.due(), session.stopping ? null : this.#connectAt].filter((time) => time !== null);
    const [began, ahead] = [now(), clockAhead()];
    const wait = Math.max(0, Math.min(...times) - began);
    await new Promise<void>((resolve) => {
      // A longer time than this wakes at once.
      const timer = times.length > 0 ? setTimeout(resolve, Math.min(Math.ceil(1000 * wait), 2 ** 31 - 1)) : undefined;
      this.#wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
    return Math.max(0, now() - began - wait) + Math.max(0, clockAhead() - ahead);
  }

  // The connection

  /** The thread stood still for so long: after some time, the coordinator has ended the connection. A clock that somebody
   * sets looks the same, and costs a connection. */
  #notice(stoodStill: number): void {
    const silence = this.#parts.session.silence;
    if (silence === null || stoodStill < Math.max(silence, SUSPENDED)) return;
    this.#leave(`the page was suspended for ${stoodStill.toFixed(0)} s`);
  }

  #networkIsBack(): void {
    this.#leave("the network has changed");
    // A time that the coordinator named is kept.
    if (this.#connectAt !== null && this.#comeBackAfter === null) {
      const { timing } = this.#parts;
      this.#connectAt = now() + secondsToWait(timing, 0, null, Math.random());
      this.#wake();
    }
  }

  #leave(reason: string): void {
    if (this.#connection === null) return;
    this.#failures = 0;
    this.#connection.leave(reason);
  }

  async #connect(): Promise<void> {
    const { url, timing, session, enrolment, log } = this.#parts;
    this.#connectAt = null;
    if (!(await this.#parts.allowed())) return;
    this.#comeBackAfter = null;
    this.#welcomed = false;
    const subprotocols = await enrolment.subprotocols();
    let opened = false;
    const connection = new Connection(url, subprotocols, timing, {
      opened: () => {
        opened = true;
        this.#events.push(() => this.#opened());
        this.#wake();
      },
      frame: (content) => {
        this.post(() => {
          const text = typeof content === "string";
          const commands = text ? session.received(content, now()) : session.receivedChunk(content, now());
          this.#welcomed ||= session.link.is === "online";
          return commands;
        });
      },
      ended: (reason) => {
        this.post(() => {
          if (this.#connection !== connection) return [];
          this.#connection = null;
          this.#upload += 1;
          this.#http.abort();
          if (session.link.is !== "closing") {
            this.#offlineFor = whyOffline(opened, reason);
            log(`${this.#offlineFor} (${url})`, "warning");
          }
          const commands = session.disconnected();
          this.#failures = this.#welcomed ? 0 : this.#failures + 1;
          const failures = isOffline() ? Number.POSITIVE_INFINITY : this.#failures + session.faults;
          const wait = secondsToWait(timing, failures, this.#comeBackAfter, Math.random());
          this.#connectAt = now() + wait;
          if (!session.stopping) log(`connecting again in ${wait.toFixed(1)} s`, "info");
          return commands;
        });
      },
    });
    this.#connection = connection;
  }

  async #opened(): Promise<Event> {
    const { session, enrolment, contents, state, url, log } = this.#parts;
    log(`connected to ${url}`, "info");
    await enrolment.accepted();
    const models = await contents.models();
    const challenge = session.trusted.length > 0 ? toHex(crypto.getRandomValues(new Uint8Array(32))) : null;
    session.known = await contents.lastManifest();
    const stated = await state();
    return () => session.connected(now(), { ...stated, models, challenge });
  }

  // Commands

  async #carryOut(commands: Command[]): Promise<void> {
    const queue = [...commands];
    for (let command = queue.shift(); command !== undefined; command = queue.shift()) {
      try {
        await this.#carryOutOne(command);
      } catch (error) {
        if (!(error instanceof StoreError) || this.#parts.session.error !== null) throw error;
        queue.splice(0, queue.length, ...this.#parts.session.abandon(error, failureOf(error)));
      }
    }
  }

  async #carryOutOne(command: Command): Promise<void> {
    const { contents, outbox, trainer, log, session, verify, saveTrusted } = this.#parts;
    switch (command.do) {
      case "note":
        return log(command.text, command.warning ? "warning" : "info");
      case "send":
        if (command.message.type === "fetch") this.#http.abort(); // it replaces any other
        if (RESULTS.has(command.message.type) && !(await this.#parts.allowed())) return;
        return this.#connection?.say(encode(command.message));
      case "verify": {
        const { signed, content } = command;
        // Events wait meanwhile, so that what the coordinator said later is also heard later.
        const good = await verify(signed.key, signed.signature, content);
        return this.#carryOut(session.verified(signed, good, now()));
      }
      case "save-trusted":
        return saveTrusted(command.keys);
      case "store-chunk":
        return contents.append(command.wanted, command.offset, command.payload);
      case "fetch-by-http":
        this.#http.abort();
        this.#http = new AbortController();
        return this.#start(this.#fetchByHttp(command, this.#http.signal));
      case "stop-http":
        return this.#http.abort();
      case "locate":
        return this.#start(this.#locate(command.task));
      case "finish-content":
        return this.#start(this.#finish(command.wanted));
      case "start-training":
      case "start-answer":
        if (!(await this.#parts.allowed())) return this.post(() => session.ended(command.task.task));
        return this.#start(
          command.do === "start-training"
            ? this.#train(command.task, command.seconds)
            : this.#answer(command.task, command.seconds),
        );
      case "stop-training":
        trainer.halt = true;
        return;
      case "save-update":
        return this.#start(this.#save());
      case "mask-update":
        return this.#start(this.#mask(command.task as MaskedTask, command.factor));
      case "drop-update":
        this.#upload += 1;
        return outbox.drop(command.task);
      case "stop-update":
        this.#upload += 1;
        return;
      case "send-update":
        this.#upload += 1;
        if (!(await this.#parts.allowed())) return;
        return this.#start(this.#sendUpdate(command, this.#upload));
      case "close":
        log(
          `closing the connection: ${command.reason}`,
          command.after !== null || session.stopping ? "info" : "warning",
        );
        this.#comeBackAfter = command.after;
        this.#offlineFor = command.reason;
        this.#upload += 1;
        this.#http.abort();
        return this.#connection?.close(command.code);
    }
  }

  // Jobs

  /** Let a job run. What it did not expect ends `run`. */
  #start(job: Promise<void>): void {
    job.catch((error: unknown) => {
      this.#error ??= error;
      this.#wake();
    });
  }

  /** Do this after the last job with the contents. */
  #inTurn<T>(act: () => Promise<T>): Promise<T> {
    const done = this.#cache.then(act, act);
    this.#cache = done.catch(() => {});
    return done;
  }

  /** Hand on the bytes of a content part by part: the next is read when one is stored. */
  async #fetchByHttp(command: Command & { do: "fetch-by-http" }, signal: AbortSignal): Promise<void> {
    const { session, timing } = this.#parts;
    const { wanted, url, size } = command;
    let place = command.begin;
    try {
      for await (const part of httpParts(url, place, size, timing.send, signal)) {
        if (signal.aborted) return;
        const begin = place;
        this.post(() => session.httpBytes(wanted.sha256, begin, part, now()));
        place += part.length;
        await this.#carriedOut();
      }
    } catch (error) {
      if (!signal.aborted) this.post(() => session.httpEnded(wanted.sha256, (error as Error).message, now()));
    }
  }

  /** Resolves when the commands of all events so far were carried out. */
  #carriedOut(): Promise<void> {
    return new Promise((resolve) => {
      this.post(() => {
        resolve();
        return [];
      });
    });
  }

  async #locate(task: Task | Question): Promise<void> {
    const { contents, session } = this.#parts;
    try {
      const lacking = await this.#inTurn(() => contents.lacking(task));
      session.known = await contents.lastManifest();
      this.post(() => session.located(task.task, lacking, now()));
    } catch (error) {
      // A file may also have been evicted since it was found.
      if (error instanceof ProtocolError) this.post(() => session.unusable(task.task, error.text));
      else this.#abandon(error);
    }
  }

  async #finish(wanted: Wanted): Promise<void> {
    const { contents, session } = this.#parts;
    try {
      const good = await this.#inTurn(() => contents.finish(wanted));
      this.post(() => session.stored(wanted.sha256, good, now()));
    } catch (error) {
      this.#abandon(error);
    }
  }

  async #train(task: Task, seconds: number): Promise<void> {
    const { trainer, session, log } = this.#parts;
    log(`task ${task.task}: training`, "info");
    try {
      const finished = await trainer.train(task, seconds);
      const { result } = finished;
      if (result.type === "report") encode(result); // throws here what the coordinator would refuse
      this.#finished = finished;
      this.post(() => session.trained(result));
    } catch (error) {
      this.#endFailed(task.task, error);
    }
  }

  async #answer(task: Question, seconds: number): Promise<void> {
    const { trainer, session } = this.#parts;
    try {
      const message = await trainer.answer(task, seconds);
      encode(message);
      contentOf(message);
      this.post(() => session.answered(message));
    } catch (error) {
      this.#endFailed(task.task, error);
    }
  }

  /** Tell the session that a training, or the work on an answer, ended without a result. */
  #endFailed(task: string, error: unknown): void {
    const { session } = this.#parts;
    if (error instanceof StoppedError) this.post(() => session.ended(task));
    else if (error instanceof StoreError || (error instanceof TrainingError && error.endsDevice)) {
      this.#abandon(error, task);
    } else this.post(() => session.ended(task, failureOf(error), inOneLine(error)));
  }

  async #save(): Promise<void> {
    const { outbox, session } = this.#parts;
    const finished = this.#finished!;
    this.#finished = null;
    try {
      await outbox.save(finished);
      this.post(() => session.saved(finished.result.task));
    } catch (error) {
      this.#abandon(error, finished.result.task);
    }
  }

  async #mask(task: MaskedTask, factor: number): Promise<void> {
    const { outbox, masker, session } = this.#parts;
    try {
      const kept = await outbox.unmasked(task.task);
      if (kept === null) throw new TrainingError("runtime-error", "the store has lost the finished update");
      const { report, content } = await masker.mask(task, kept.update, kept.share, factor);
      await outbox.saveMasked(report, content);
      this.post(() => session.masked(report));
    } catch (error) {
      this.#endFailed(task.task, error);
    }
  }

  async #sendUpdate(command: Extract<Command, { do: "send-update" }>, upload: number): Promise<void> {
    const { outbox, session } = this.#parts;
    const { report, transfer, offset, chunkBytes } = command;
    try {
      const frames = await outbox.chunks(report, transfer, offset, chunkBytes);
      const sent = await this.#connection?.stream(frames, () => this.#upload === upload);
      if (sent === true) this.post(() => session.updateSent(transfer, now()));
    } catch (error) {
      this.#abandon(error);
    }
  }

  /** End the device with this error; `task` names the task whose training or saving it ended. */
  #abandon(error: unknown, task: string | null = null): void {
    const { session } = this.#parts;
    if (!(error instanceof StoreError || error instanceof TrainingError)) throw error;
    this.post(() => [...session.abandon(error, failureOf(error)), ...(task === null ? [] : session.ended(task))]);
  }
}

/** Return what the coordinator is told of this error. */
function failureOf(error: unknown): FailureCode {
  if (error instanceof TrainingError) return error.code;
  if (error instanceof StoreError) return error.reason === "full" ? "disk-full" : "runtime-error";
  return error instanceof ProtocolError ? "bad-bundle" : "runtime-error";
}

function whyOffline(opened: boolean, reason: string): string {
  if (isOffline()) return "there is no network";
  if (opened) return `the connection ended: ${reason}`;
  return (
    `no connection: the coordinator cannot be reached, or does not take this device; a device that it does not know, ` +
    `or knows no longer, needs a token that is not used up (${reason})`
  );
}

/** Seconds that the wall clock is ahead of the monotonic one. */
function clockAhead(): number {
  return Date.now() / 1000 - now();
}

/** Seconds on a clock that never goes back. */
function now(): number {
  return performance.now() / 1000;
}
