// What changes something: a question before what cannot be undone, and what came of it.

import { el } from "./dom.js";
import { ask, mayOperate } from "./live.js";

const SHOWN = 6000;

// Say something for a while.
export function tell(text) {
  const line = el("p", {}, text);
  document.getElementById("told").append(line);
  setTimeout(() => line.remove(), SHOWN);
}

// Return whether a person, who is asked, wants it.
export function confirm(question, explanation, verb) {
  return new Promise((resolve) => {
    const heading = el("h2", { id: "question" }, question);
    const cancel = el("button", { type: "button", onclick: () => dialog.close("") }, "Cancel");
    const go = el("button", { type: "button", class: "danger", onclick: () => dialog.close("go") }, verb);
    const dialog = el(
      "dialog",
      { "aria-labelledby": "question" },
      heading,
      el("p", {}, explanation),
      el("div", { class: "actions" }, cancel, go),
    );
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "go");
    });
    document.body.append(dialog);
    dialog.showModal();
    cancel.focus();
  });
}

// Return a button that asks `path` of the coordinator. options: body, question, explanation, done
// (what is said then), after (called then), danger.
export function button(name, path, options = {}) {
  const node = el("button", { type: "button", class: options.danger ? "danger" : null }, name);
  if (!mayOperate()) {
    node.disabled = true;
    node.title = "your role is to view; this needs the role operate";
    return node;
  }
  node.addEventListener("click", async () => {
    if (options.question) {
      if (!(await confirm(options.question, options.explanation ?? "", name))) return;
    }
    node.disabled = true;
    try {
      const answer = await ask(path, options.body ?? {});
      tell(options.done ?? `${name}: done`);
      options.after?.(answer);
    } catch (error) {
      tell(`${name}: ${error.message}`);
    } finally {
      node.disabled = false;
    }
  });
  return node;
}
