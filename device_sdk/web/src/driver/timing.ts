/** How long a device waits for the network, and before it connects again. */

/** Time limits, in seconds. The defaults suit devices on real networks; tests take smaller ones. */
export interface Timing {
  /** Connecting and the WebSocket handshake. */
  readonly open: number;
  /** Sending: how long the coordinator may take nothing; then the connection is given up. */
  readonly send: number;
  /** The closing handshake; then the connection is given up. */
  readonly close: number;
  /** Longest wait before the first connection after one that was welcomed; it doubles with each failure. */
  readonly base: number;
  /** Longest wait before any connection. */
  readonly cap: number;
}

export const TIMING: Timing = { open: 10, send: 30, close: 5, base: 0.5, cap: 60 };

/**
 * Return how long to wait before the next connection, in seconds.
 *
 * If the coordinator said `comeBackAfter`, that is 0.5 to 1.5 times as long. Otherwise it is between 0 and
 * min(cap, base * 2^failures) ("full jitter": Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog 2015).
 * random: from 0 to 1.
 */
export function secondsToWait(timing: Timing, failures: number, comeBackAfter: number | null, random: number): number {
  if (comeBackAfter !== null) return (0.5 + random) * comeBackAfter;
  return random * Math.min(timing.cap, timing.base * 2 ** Math.min(failures, 30));
}
