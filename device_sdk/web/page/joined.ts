/** The view of those who joined: drawing, this device, the round, leaving. */

import { type DeviceState, keepStorage, ScreenLock } from "../src/index.ts";
import { focusAfter, scarcest, showDrawings } from "./draw/drawings.ts";
import { Pad, showSeen } from "./draw/pad.ts";
import { pixelsOf } from "./draw/preprocess.ts";
import { showRound } from "./round/panel.ts";
import { follow } from "./round/status.ts";
import { announce, make, the, write } from "./shell/elements.ts";
import type { PageSettings } from "./shell/invitation.ts";
import { notice } from "./shell/notices.ts";
import { forgetOffline } from "./shell/offline.ts";
import { type Choices, type Drawing, NOTHING_CHOSEN, type Records } from "./shell/records.ts";
import { connectionWords, endedWords, FEWEST, recordsWords } from "./shell/words.ts";
import { ask, likeliest, probabilities, showGuesses } from "./train/guess.ts";
import { showDevice } from "./train/panel.ts";
import { Phone, STORE } from "./train/phone.ts";

/** The choices that are check boxes, by their ids. */
const SWITCHES = ["awake", "charging", "unmetered"] as const;
const STOPPED: DeviceState = { phase: "stopped", accepted: 0, acceptedBytes: 0 };

export class Joined {
  readonly #settings: PageSettings;
  readonly #records: Records;
  readonly #left: () => void;
  readonly #pad: Pad;
  readonly #phone: Phone;
  readonly #screen = new ScreenLock();
  #choices: Choices = NOTHING_CHOSEN;
  #drawings: readonly Drawing[] = [];
  #state: DeviceState = STOPPED;
  /** When the device began to look for the coordinator; null while it is connected, or has no reason to be. */
  #connectingSince: number | null = null;
  #hostAnswers: boolean | null = null;
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
      ended: (error) => void this.#deviceEnded(error),
    });
    this.#wire();
  }

  /** Show what is there, and go on training where it was under way when the page was closed. */
  async open(): Promise<void> {
    this.#choices = await this.#records.choices();
    this.#drawings = await this.#records.drawings();
    the("awake-box").hidden = !ScreenLock.isSupported;
    the("asking").hidden = !this.#records.lasting; // another worker asks: it finds the model in the database alone
    for (const name of SWITCHES) the<HTMLInputElement>(name).checked = this.#choices[name];
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
    for (const name of ["online", "offline"]) addEventListener(name, () => this.#showConnection());
    setInterval(() => this.#showConnection(), 2000);
  }

  #follow(): void {
    const { status } = this.#settings;
    the("round").hidden = status === null;
    if (status === null || this.#following) return;
    this.#following = true;
    follow(status, (found) => {
      this.#hostAnswers = found !== null;
      if (found !== null) showRound(found);
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
    await this.#drawingsChanged();
    announce(`Kept as ${label}. ${this.#drawings.length} drawings.`);
  }

  async #remove(drawing: Drawing): Promise<void> {
    const place = this.#drawings.length - 1 - this.#drawings.indexOf(drawing);
    await this.#records.remove(drawing.id);
    await this.#drawingsChanged(true);
    focusAfter(place);
    announce(`Deleted. ${this.#drawings.length} drawings.`);
  }

  async #drawingsChanged(deleted = false): Promise<void> {
    this.#drawings = await this.#records.drawings();
    this.#showDrawings();
    if (this.#drawings.length < FEWEST) {
      if (this.#phone.started) await this.#choose({ training: false });
      await this.#phone.stop();
    } else this.#phone.use(this.#drawings, deleted);
    this.#show();
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
      const found = probabilities(answer.losses);
      showGuesses(found);
      const [first] = likeliest(found);
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
    const { token, paused } = this.#choices;
    const { lasting } = this.#records;
    void keepStorage();
    this.#phone.start(this.#drawings, { token, paused, only: this.#only, lasting });
  }

  get #only(): { charging: boolean; unmetered: boolean } {
    const { charging, unmetered } = this.#choices;
    return { charging, unmetered };
  }

  async #start(): Promise<void> {
    notice("device", null);
    notice("done", null);
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
    if (letIn && this.#choices.token !== null) await this.#choose({ token: null });
    this.#show();
  }

  async #deviceEnded(error: unknown): Promise<void> {
    await this.#choose({ training: false, paused: false });
    if (error === null) notice("done", { what: "The training is finished.", advice: "Thank you for taking part." });
    else notice("device", endedWords(error));
    this.#show();
  }

  async #leave(): Promise<void> {
    await this.#end();
    await this.#choose(NOTHING_CHOSEN);
    announce("You left. Your drawings are still on this device.");
    this.#left();
  }

  async #erase(): Promise<void> {
    await this.#end();
    await this.#phone.erase();
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
    for (const cause of ["connection", "device", "storage", "done"] as const) notice(cause, null);
  }

  // All of it

  async #choose(change: Partial<Choices> | ((now: Choices) => Partial<Choices>)): Promise<void> {
    const changed = (now: Choices): Choices => ({ ...now, ...(typeof change === "function" ? change(now) : change) });
    try {
      this.#choices = await this.#records.choose(changed);
    } catch (error) {
      this.#choices = changed(this.#choices);
      notice("storage", recordsWords(error));
    }
  }

  #show(): void {
    const { accepted, acceptedBytes, awake, paused } = this.#choices;
    const { started } = this.#phone;
    showDevice({ state: this.#state, started, paused, drawings: this.#drawings.length, accepted, acceptedBytes });
    this.#screen.want(awake && started && !paused);
    this.#showConnection();
  }

  #showConnection(): void {
    if (this.#connectingSince === null || !this.#phone.started) {
      notice("connection", navigator.onLine ? null : connectionWords({ online: false, seconds: 0, hostAnswers: null }));
      return;
    }
    const seconds = (Date.now() - this.#connectingSince) / 1000;
    const { onLine: online } = navigator;
    notice("connection", connectionWords({ online, seconds, hostAnswers: this.#hostAnswers }));
  }
}
