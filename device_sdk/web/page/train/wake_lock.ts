/** Keeps the screen on while the device trains, where the person wants it and the browser can. */

export const CAN_STAY_AWAKE = "wakeLock" in navigator;

let wanted = false;
let lock: WakeLockSentinel | null = null;

/** Keep the screen on from now on, or let it go off. */
export function stayAwake(awake: boolean): void {
  wanted = awake && CAN_STAY_AWAKE;
  void settle();
}

async function settle(): Promise<void> {
  if (!wanted) {
    const held = lock;
    lock = null;
    await held?.release();
  } else if (lock === null && document.visibilityState === "visible") {
    try {
      lock = await navigator.wakeLock.request("screen");
      lock.addEventListener("release", () => {
        lock = null;
      });
      if (!wanted) await settle();
    } catch {
      // The system refuses, for example while it saves power: the training goes on without.
    }
  }
}

// The browser takes the lock away from a page that is hidden.
document.addEventListener("visibilitychange", () => void settle());
