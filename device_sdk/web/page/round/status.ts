/** The round's public counts: status.json, asked for while the page is visible. */

export interface Finished {
  readonly round: number;
  readonly loss: number | null;
  readonly accuracy: number | null;
  readonly devices: number;
}

export interface Status {
  readonly run: string;
  readonly state: "running" | "paused" | "finished";
  readonly round: number;
  readonly rounds: number | null;
  readonly reports: number;
  readonly goal: number;
  readonly connected: number;
  /** Of a run with differential privacy: whether what devices measure is shown to nobody, or with noise. */
  readonly private: "none" | "noised" | null;
  /** The rounds that ended, the last hundred, in order. */
  readonly history: readonly Finished[];
}

/** Milliseconds between two looks, and the longest wait after failures. */
const EVERY = 2000;
const LONGEST = 30_000;

/** Read status.json; what is missing or is no number counts as not known. Throws TypeError where it is no object. */
export function readStatus(found: unknown): Status {
  if (typeof found !== "object" || found === null) throw new TypeError("status.json is not an object");
  const status = found as Record<string, unknown>;
  const state = status.state;
  return {
    run: String(status.run ?? ""),
    state: state === "paused" || state === "finished" ? state : "running",
    round: number(status.round) ?? 0,
    rounds: number(status.rounds),
    reports: number(status.reports) ?? 0,
    goal: number(status.goal) ?? 0,
    connected: number(status.connected) ?? 0,
    private: status.private === "none" || status.private === "noised" ? status.private : null,
    history: (Array.isArray(status.history) ? status.history : []).map((row: Record<string, unknown>) => ({
      round: number(row.round) ?? 0,
      loss: number(row.loss),
      accuracy: number(row.accuracy),
      devices: number(row.devices) ?? 0,
    })),
  };
}

function number(found: unknown): number | null {
  return typeof found === "number" && Number.isFinite(found) ? found : null;
}

/** Return the round in words: `Round 3 of 20`. */
export function roundWords(status: Status): string {
  const of = status.rounds === null || status.rounds === 0 ? "" : ` of ${status.rounds}`;
  if (status.state === "finished") return `Finished after ${status.round === 1 ? "1 round" : `${status.round} rounds`}`;
  return `Round ${status.round}${of}${status.state === "paused" ? ", paused" : ""}`;
}

/** Ask for the status again and again while the page is visible; `tell` gets null where it cannot be had. */
export function follow(url: string, tell: (status: Status | null) => void): void {
  let failures = 0;
  let timer: ReturnType<typeof setTimeout> | undefined;
  const look = async (): Promise<void> => {
    clearTimeout(timer);
    if (document.visibilityState === "hidden") return; // `visibilitychange` calls again
    try {
      const answer = await fetch(url, { cache: "no-store" });
      if (!answer.ok) throw new Error(`${url} answered ${answer.status}`);
      tell(readStatus(await answer.json()));
      failures = 0;
    } catch {
      failures += 1;
      tell(null);
    }
    clearTimeout(timer);
    timer = setTimeout(look, Math.min(LONGEST, EVERY * 2 ** Math.min(failures, 10)));
  };
  document.addEventListener("visibilitychange", look);
  addEventListener("online", look);
  void look();
}
