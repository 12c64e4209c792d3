/** The view of those who joined: drawing, this device, the round, leaving. */

import { type DeviceState, keepStorage, type ProtocolError, ScreenLock } from "../src/index.ts";
import { focusAfter, scarcest, showDrawings } from "./draw/drawings.ts";
import { Pad, showSeen } from "./draw/pad.ts";
import { pixelsOf } from "./draw/preprocess.ts";
import { showRound } from "./round/panel.ts";
import { follow } from "./round/status.ts";
import { announce, make, the, write } from "./shell/elements.ts";
import { type PageSettings, takesPage } from "./shell/invitation.ts";
import { notice } from "./shell/notices.ts";
import { forgetOffline } from "./shell/offline.ts";
import { type Choices, type Drawing, NOTHING_CHOSEN, type Records } from "./shell/records.ts";
import { type Changes, changesOf, Tabs } from "./shell/tabs.ts";
import {
  connectionWords,
  endedWords,
  FEWEST,
  keptWords,
  OTHER_TAB,
  type Problem,
  recordsWords,
} from "./shell/words.ts";
import { ask, likeliest, probabilities, showGuesses } from "./train/guess.ts";
import { showDevice } from "./train/panel.ts";
import { Phone, STORE } from "./train/phone.ts";
import { wireRosterLine } from "./train/roster.ts";

/** The choices that are check boxes, by their ids. */
const SWITCHES = ["awake", "charging", "unmetered"] as const;
const STOPPED: DeviceState = { phase: "stopped", accepted: 0, acceptedBytes: 0 };
/** Choices that outlive leaving: an invitation that was not used yet, and what the coordinator knows. */
const left = ({ token, admitted, discard }: Choices): Choices => ({ ...NOTHING_CHOSEN, token, admitted, discard });

export class Joined {
  readonly #settings: PageSettings;
  readonly #records: Records;
  readonly #left: () => void;
  readonly #pad: Pad;
  readonly #phone: Phone;
  readonly #screen = new ScreenLock();
  readonly #tabs: Tabs;
  /** The person joined, and neither left nor is erasing everything. */
  #isOpen = false;
  /** The last change or look at the records: one after the other. */
  #turn: Promise<unknown> = Promise.resolve();
  #choices: Choices = NOTHING_CHOSEN;
  #drawings: readonly Drawing[] = [];
  #state: DeviceState = STOPPED;
  /** When the device began to look for the coordinator; null while it is connected, or has no reason to be. */
  #connectingSince: number | null = null;
  #hostAnswers: boolean | null = null;
  /** The training is finished, as the coordinator told this device or as the round's counts say. */
  #finished = false;
  /** The label that was kept last. */
  #kept: number | null = null;
  #asking = false;
  #following = false;

  /** left: called when the person left or erased everything. */
  constructor(settings: PageSettings, records: Records, left: () => void) {
    this.#settings = settings;
    this.#records = records;
    this.#left = left;
    this.#pad = new Pad(the<HTMLCanvasElement>("pad"), {
      changed: () => this.#padChanged(),
      labelled: (label) => void this.#keep(label),
    });
    this.#phone = new Phone(settings.coordinator, {
      changed: (state) => void this.#deviceChanged(state),
      discarded: () => void this.#choose({ discard: false }),
      consent: () => this.#consents(),
      ended: (error) => void this.#deviceEnded(error),
    });
    this.#tabs = new Tabs(() => void this.#lookAgain());
    this.#wire();
  }

  /** Show what is there, and go on training where it was under way when the page was closed. */
  async open(): Promise<void> {
    await this.#look();
    this.#isOpen = true;
    the("awake-box").hidden = !ScreenLock.isSupported;
    the("roster-box").hidden = !this.#records.lasting; // the device has no name then before it trains
    the("asking").hidden = !this.#records.lasting; // another worker asks: it finds the model in the database alone
    this.#padChanged();
    this.#showDrawings();
    this.#follow();
    if (this.#choices.training && this.#drawings.length >= FEWEST) this.#train();
    this.#show();
  }

  #wire(): void {
    const press = (id: string, act: () => unknown): void => the(id).addEventListener("click", () => void act());
    for (let digit = 0; digit < 10; digit++) {
      const button = make("button", { type: "button", "aria-label": `Keep as ${digit}` }, `${digit}`);
      button.addEventListener("click", () => void this.#keep(digit));
      the("labels").append(button);
    }
    press("undo", () => this.#pad.undo());
    press("clear", () => this.#pad.clear());
    press("ask", () => this.#ask());
    press("start", () => this.#start());
    press("pause", () => this.#setPaused(true));
    press("resume", () => this.#setPaused(false));
    press("leave", () => this.#leave());
    const sure = the<HTMLDialogElement>("sure");
    press("erase", () => sure.showModal());
    press("sure-no", () => sure.close());
    press("sure-yes", () => {
      sure.close();
      return this.#erase();
    });
    for (const name of SWITCHES) {
      the<HTMLInputElement>(name).addEventListener("change", async ({ target }) => {
        await this.#choose({ [name]: (target as HTMLInputElement).checked });
        if (name !== "awake") this.#phone.require(this.#only);
        this.#show();
      });
    }
    for (const name of ["online", "offline"]) addEventListener(name, () => this.#show());
    setInterval(() => this.#show(), 2000);
    wireRosterLine();
    press("pill", () => the("phone").scrollIntoView({ block: "start" }));
  }

  #follow(): void {
    const { status } = this.#settings;
    the("round").hidden = status === null;
    if (status === null || this.#following) return;
    this.#following = true;
    follow(status, (found) => {
      this.#hostAnswers = found !== null;
      if (found === null) return;
      showRound(found);
      if (this.#finished === (found.state === "finished")) return;
      this.#finished = found.state === "finished";
      this.#show();
    });
  }

  // Drawing

  #padChanged(): void {
    const { strokes } = this.#pad;
    showSeen(the<HTMLCanvasElement>("seen"), strokes);
    for (const id of ["undo", "clear", "ask"]) the<HTMLButtonElement>(id).disabled = strokes.length === 0;
    the("guesses").replaceChildren();
  }

  async #keep(label: number): Promise<void> {
    const { strokes } = this.#pad;
    if (strokes.length === 0) {
      write("hint", "Draw a digit first.");
      announce("Draw a digit first.");
      return;
    }
    this.#pad.clear(); // at once: the next drawing may begin while this one is written
    try {
      await this.#records.add({ label, strokes, pixels: pixelsOf(strokes) });
      notice("storage", null);
    } catch (error) {
      if (this.#pad.strokes.length === 0) this.#pad.show(strokes);
      notice("storage", recordsWords(error));
      return;
    }
    this.#kept = label;
    await this.#drawingsChanged();
    announce(keptWords(label, this.#drawings.length));
  }

  async #remove(drawing: Drawing): Promise<void> {
    const index = this.#drawings.length - 1 - this.#drawings.findIndex(({ id }) => id === drawing.id);
    this.#kept = null;
    await this.#choose({ discard: true });
    await this.#records.remove(drawing.id);
    await this.#drawingsChanged();
    focusAfter(index);
    announce(`Deleted. ${this.#drawings.length} drawings.`);
  }

  /** This tab kept or deleted a drawing. */
  async #drawingsChanged(): Promise<void> {
    this.#tabs.tell();
    await this.#useDrawings((await this.#look()).drawings);
    this.#show();
  }

  /** Go on with the drawings as they are now. */
  async #useDrawings(changed: Changes["drawings"]): Promise<void> {
    this.#showDrawings();
    if (this.#drawings.length >= FEWEST) {
      if (changed !== null) this.#phone.use(this.#drawings, changed === "deleted");
      return;
    }
    if (this.#phone.started && this.#choices.training) await this.#choose({ training: false });
    await this.#phone.stop();
  }

  #showDrawings(): void {
    showDrawings(this.#drawings, (drawing) => void this.#remove(drawing));
    write("hint", `Next, perhaps a ${scarcest(this.#drawings)}: different digits teach the model most.`);
  }

  async #ask(): Promise<void> {
    if (this.#asking) return;
    this.#asking = true;
    write("hint", "Asking the shared model …");
    const answer = await ask({ store: STORE, pixels: pixelsOf(this.#pad.strokes) });
    this.#asking = false;
    if (answer.is === "losses") {
      const shares = probabilities(answer.losses);
      showGuesses(shares);
      const [first] = likeliest(shares);
      const text = `The shared model says: ${first!.label}.`;
      write("hint", text);
      announce(text);
    } else if (answer.is === "none") {
      write("hint", "The shared model is not on this device now: it comes with the next round that you take part in.");
    } else write("hint", `The shared model could not be asked: ${answer.text}`);
  }

  // The device

  #train(): void {
    this.#connectingSince = Date.now();
    const { token, paused, discard } = this.#choices;
    const { lasting } = this.#records;
    void keepStorage();
    this.#phone.start(this.#drawings, { token, paused, only: this.#only, lasting, discard });
  }

  get #only(): { charging: boolean; unmetered: boolean } {
    const { charging, unmetered } = this.#choices;
    return { charging, unmetered };
  }

  async #start(): Promise<void> {
    notice("device", null);
    this.#finished = false;
    await this.#choose({ training: true, paused: false });
    this.#train();
    this.#show();
  }

  async #setPaused(paused: boolean): Promise<void> {
    if (paused) this.#phone.pause();
    else this.#phone.resume();
    await this.#choose({ paused });
    this.#show();
  }

  async #deviceChanged(state: DeviceState): Promise<void> {
    const before = this.#state;
    this.#state = state;
    if (state.phase !== "connecting") this.#connectingSince = null;
    else this.#connectingSince ??= Date.now();
    const more = state.accepted - (state.accepted < before.accepted ? 0 : before.accepted);
    if (more > 0) {
      const bytes = state.acceptedBytes - (state.accepted < before.accepted ? 0 : before.acceptedBytes);
      await this.#choose(({ accepted, acceptedBytes }) => ({
        accepted: accepted + more,
        acceptedBytes: acceptedBytes + bytes,
      }));
    }
    const letIn = state.phase === "waiting" || state.phase === "downloading";
    const { token, admitted } = this.#choices;
    if (letIn && (token !== null || !admitted)) await this.#choose({ token: null, admitted: true });
    this.#show();
  }

  async #deviceEnded(error: unknown): Promise<void> {
    // Another tab that trains goes on.
    const elsewhere = (error as Partial<ProtocolError> | null)?.code === "replaced" || this.#waitsForTab;
    if (!elsewhere) await this.#choose({ training: false, paused: false });
    if (error === null) {
      this.#finished = true;
      announce("The training is finished.");
    } else if (this.#isOpen) notice("device", endedWords(error));
    this.#show();
  }

  get #waitsForTab(): boolean {
    return this.#state.phase === "paused" && this.#state.why === OTHER_TAB;
  }

  async #leave(): Promise<void> {
    this.#isOpen = false;
    await this.#choose(left); // at once, so that other tabs hear of it
    await this.#end();
    announce("You left. Your drawings are still on this device.");
    this.#left();
  }

  async #erase(): Promise<void> {
    this.#isOpen = false;
    // First of all the other tabs must see that there is nothing more to train on; then they let go of the databases.
    await this.#records.clear().catch(() => {});
    this.#tabs.tell();
    await this.#end();
    await this.#phone.erase().catch(() => {}); // it can be gone already, with all else that the browser kept
    await this.#records.erase();
    await forgetOffline();
    history.replaceState({ erased: true }, "");
    location.reload();
  }

  async #end(): Promise<void> {
    await this.#phone.stop();
    this.#state = STOPPED;
    this.#connectingSince = null;
    this.#screen.want(false);
    for (const cause of ["connection", "device", "storage"] as const) notice(cause, null);
  }

  // Other tabs

  /** Do this after the changes and looks before it. */
  #inTurn<T>(act: () => Promise<T>): Promise<T> {
    const done = this.#turn.then(act, act);
    this.#turn = done.catch(() => {});
    return done;
  }

  /** Read what the tabs share. Returns what changed since the last look. Rejects where the records are gone. */
  #look(): Promise<Changes> {
    return this.#inTurn(async () => {
      const before = { choices: this.#choices, drawings: this.#drawings };
      const now = { choices: await this.#records.choices(), drawings: await this.#records.drawings() };
      this.#choices = now.choices;
      this.#drawings = now.drawings;
      return changesOf(before, now);
    });
  }

  /** Do what the person told another tab to do. */
  async #lookAgain(): Promise<void> {
    if (!this.#isOpen) return;
    let changes: Changes;
    try {
      changes = await this.#look();
    } catch {
      return; // the records are gone, and the page is told so
    }
    if (!this.#isOpen) return;
    if (changes.left) {
      this.#isOpen = false;
      await this.#end();
      this.#left();
      return;
    }
    if (changes.training === false) await this.#phone.stop();
    if (changes.paused === true) this.#phone.pause();
    if (changes.paused === false) this.#phone.resume();
    if (changes.conditions) this.#phone.require(this.#only);
    if (changes.drawings !== null) await this.#useDrawings(changes.drawings);
    // Without locks two tabs cannot take turns.
    if (changes.training === true && !this.#phone.started && navigator.locks !== undefined) this.#train();
    this.#show();
  }

  /** Whether the device may go on: asked before it connects, trains and sends, also when the tab was frozen for long. */
  async #consents(): Promise<boolean> {
    await this.#lookAgain();
    return this.#isOpen && this.#phone.started && !this.#choices.paused && this.#phone.hasOnlyKept;
  }

  // All of it

  async #choose(change: Partial<Choices> | ((now: Choices) => Partial<Choices>)): Promise<void> {
    const changed = (now: Choices): Choices => ({ ...now, ...(typeof change === "function" ? change(now) : change) });
    await this.#inTurn(async () => {
      try {
        this.#choices = await this.#records.choose(changed);
      } catch (error) {
        this.#choices = changed(this.#choices);
        if (this.#isOpen) notice("storage", recordsWords(error));
      }
    });
    this.#tabs.tell();
  }

  #show(): void {
    if (!this.#isOpen) return;
    const { accepted, acceptedBytes, awake, paused } = this.#choices;
    const { started } = this.#phone;
    const drawings = this.#drawings.length;
    const trouble = this.#connectionProblem();
    notice("connection", trouble);
    const finished = this.#finished && !started;
    const told = { trouble, finished, drawings, accepted, acceptedBytes };
    showDevice({ state: this.#state, started, paused, ...told });
    write("kept", keptWords(this.#kept, drawings, started || finished));
    for (const name of SWITCHES) the<HTMLInputElement>(name).checked = this.#choices[name];
    this.#screen.want(awake && started && !paused);
  }

  /** Return why the device cannot connect, for the person; null while it may still be early. */
  #connectionProblem(): Problem | null {
    const { onLine: online } = navigator;
    const since = this.#phone.started ? this.#connectingSince : null;
    if (online && since === null) return null;
    const { token, admitted } = this.#choices;
    return connectionWords({
      online,
      seconds: since === null ? 0 : (Date.now() - since) / 1000,
      hostAnswers: this.#hostAnswers,
      secure: isSecureContext,
      origin: location.origin,
      takesPage: takesPage(this.#settings, location),
      invitation:
        this.#settings.invites === false ? "not needed" : admitted ? "used" : token === null ? "none" : "given",
    });
  }
}
