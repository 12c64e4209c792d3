/** Keeps a screen on, and so the page from being frozen, while the page wants it (Screen Wake Lock API). */

interface Held {
  release(): Promise<void>;
}

/** For a page. Each time that the page is visible again, the browser is asked again. */
export class ScreenLock {
  #wanted = false;
  #held: Promise<Held | null> | null = null;

  /** Whether this browser can keep the screen on. */
  static get isSupported(): boolean {
    return "wakeLock" in navigator;
  }

  /** Keep the screen on, or no longer; for example while the device is training, if the person allows it. */
  want(on: boolean): void {
    if (on === this.#wanted || !ScreenLock.isSupported) return;
    this.#wanted = on;
    if (on) {
      document.addEventListener("visibilitychange", this.#ask);
      this.#ask();
    } else {
      document.removeEventListener("visibilitychange", this.#ask);
      void this.#held?.then((held) => held?.release());
      this.#held = null;
    }
  }

  #ask = (): void => {
    // The browser lets the screen go off when the page is hidden.
    if (document.visibilityState !== "visible") return;
    this.#held = navigator.wakeLock.request("screen").catch(() => null); // refused: the battery is low
  };
}
