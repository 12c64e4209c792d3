// Who did what, the newest first.

import { el, moment, show, table } from "./dom.js";
import { ask } from "./live.js";

function described(about) {
  const words = (key, value) => {
    if (key === "until") return moment(value);
    if (Array.isArray(value)) return value.join(" ");
    return typeof value === "object" ? JSON.stringify(value) : value;
  };
  return Object.entries(about)
    .filter(([, value]) => value !== null && value.length !== 0)
    .map(([key, value]) => `${key} ${words(key, value)}`)
    .join(", ");
}

export function audit(root) {
  const rows = table(
    "What people and devices did, the newest first",
    [{ name: "When" }, { name: "What" }, { name: "Who" }, { name: "About", wide: true }],
    { empty: "Nobody has done anything yet." },
  );
  const panel = el("div", { class: "panel" }, rows.node);
  show(panel, false); // nothing is known yet
  const error = el("p", { class: "error", role: "alert" });
  root.append(
    el("div", { class: "titled" }, el("h1", {}, "Audit log")),
    el("p", { class: "quiet" }, "“fleetlearn-coordinator audit” also checks that no row was changed."),
    error,
    panel,
  );
  let due = 0;

  async function tick() {
    if (Date.now() < due) return;
    due = Date.now() + 4000;
    try {
      const found = await ask("v1/audit?last=200");
      rows.draw(
        found.reverse().map((row) => {
          const { who = "", ...about } = row.about;
          return { key: row.number, cells: [moment(row.at), row.what, String(who), described(about)] };
        }),
      );
      show(panel, true);
      error.textContent = "";
    } catch (refused) {
      error.textContent = refused.message;
    }
  }
  tick();
  return { title: "Audit log", topics: ["host"], update() {}, tick };
}
