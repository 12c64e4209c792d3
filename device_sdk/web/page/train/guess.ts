/** What the newest shared model takes a drawing for. It is asked on this device: nothing is sent. */

import { make, the } from "../shell/elements.ts";

/** What the page asks the worker, and what it answers. */
export interface Question {
  readonly store: string;
  readonly pixels: Uint8Array;
}
export type Answer =
  /** The loss of the drawing under each label. */
  | { readonly is: "losses"; readonly losses: readonly number[] }
  /** There is no shared model on this device yet. */
  | { readonly is: "none" }
  | { readonly is: "failed"; readonly text: string };

/** Milliseconds after which a worker that nobody asks is ended: it holds tens of megabytes. */
const IDLE = 30_000;
/** How many digits are shown. */
const SHOWN = 3;

let worker: Worker | null = null;
let idle: ReturnType<typeof setTimeout> | undefined;

/** Ask. Two questions at a time are not allowed. */
export function ask(question: Question): Promise<Answer> {
  clearTimeout(idle);
  worker ??= new Worker("guess_worker.js", { type: "module" });
  const asked = worker;
  return new Promise<Answer>((resolve) => {
    asked.onmessage = ({ data }: MessageEvent<Answer>) => resolve(data);
    asked.onerror = ({ message }) => resolve({ is: "failed", text: message || "its script could not be loaded" });
    asked.postMessage(question);
  }).finally(() => {
    idle = setTimeout(() => {
      asked.terminate();
      worker = null;
    }, IDLE);
  });
}

/** Return the model's probability of each label: its loss is the cross-entropy, -log p. */
export function probabilities(losses: readonly number[]): number[] {
  const least = Math.min(...losses);
  const weights = losses.map((loss) => Math.exp(least - loss));
  const sum = weights.reduce((total, weight) => total + weight, 0);
  return weights.map((weight) => weight / sum);
}

/** Return the likeliest labels, the first the likeliest. */
export function likeliest(found: readonly number[]): { readonly label: number; readonly probability: number }[] {
  const rows = found.map((probability, label) => ({ label, probability }));
  return rows.sort((one, other) => other.probability - one.probability).slice(0, SHOWN);
}

export function showGuesses(found: readonly number[]): void {
  const rows = likeliest(found).map(({ label, probability }) => {
    const percent = `${Math.round(100 * probability)} %`;
    const bar = make("progress", { max: "1", value: `${probability}`, "aria-hidden": "true" });
    return make("li", {}, make("b", {}, `${label}`), bar, make("span", {}, percent));
  });
  the("guesses").replaceChildren(...rows);
}
