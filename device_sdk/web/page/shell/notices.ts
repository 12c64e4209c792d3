/** What went wrong: where the person looks for it, until it is over or the person has put it away. */

import { make, the } from "./elements.ts";
import type { Problem } from "./words.ts";

/** Causes of notices; each has one at most. */
export type Cause = "page" | "connection" | "device" | "storage" | "private" | "erased" | "invitation";

/** Where a notice of the cause stands. Those that are not here stand above everything else. */
const PLACES: Partial<Record<Cause, string>> = {
  connection: "device-notices",
  device: "device-notices",
  storage: "draw-notices",
};

const shown = new Map<Cause, { readonly problem: Problem; readonly element: HTMLElement }>();

/** Show a problem, or take it away with null. One that is shown already is not shown again: it would be read again. */
export function notice(cause: Cause, problem: Problem | null): void {
  const before = shown.get(cause);
  if (before !== undefined && before.problem.what === problem?.what && before.problem.advice === problem.advice) return;
  before?.element.remove();
  shown.delete(cause);
  if (problem === null) return;
  const close = make("button", { type: "button", "aria-label": `OK: ${problem.what}` }, "OK");
  const text = make("span", {}, make("b", {}, problem.what), ` ${problem.advice}`);
  const element = make("div", { class: "notice" }, text, close);
  close.addEventListener("click", () => {
    element.remove();
    the("main").focus();
  });
  shown.set(cause, { problem, element });
  the(PLACES[cause] ?? "notices").append(element);
}
