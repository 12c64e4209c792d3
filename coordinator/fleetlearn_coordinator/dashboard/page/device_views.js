// The devices, paged and searched by the coordinator; and one device.

import { button } from "./actions.js";
import { ago, count, el, moment, plural, say, show, table } from "./dom.js";
import { ask, now, who } from "./live.js";

const ROWS = 50;
const AGAIN = 4000;

function stateOf(row) {
  if (row.revoked) return ["revoked", "bad"];
  if (row.connected) return ["connected", "good"];
  return [row.seen ? "away" : "never seen", ""];
}

function badge(row) {
  const [word, kind] = stateOf(row);
  return el("span", { class: `badge ${kind}` }, word);
}

export function devices(root, query) {
  const asked = new URLSearchParams(query);
  let offset = Number(asked.get("offset")) || 0;
  const search = el("input", { type: "search", value: asked.get("search") ?? "", placeholder: "name, tag, tier or runtime", autocomplete: "off" });
  const which = el(
    "select",
    {},
    [["", "all"], ["connected", "connected"], ["away", "away"], ["error", "with an error"], ["revoked", "revoked"]].map(([value, name]) =>
      el("option", { value, selected: asked.get("state") === value }, name),
    ),
  );
  const sum = el("p", { class: "quiet", role: "status" });
  const error = el("p", { class: "error", role: "alert" });
  const rows = table(
    "Devices",
    [
      { name: "Device" }, { name: "State" }, { name: "Last seen" }, { name: "Runtime" },
      { name: "Reports", number: true }, { name: "Failed tasks", number: true }, { name: "Lost tasks", number: true },
      { name: "Tags", wide: true }, { name: "Last error", wide: true },
    ],
    { empty: "No device fits." , quiet: true },
  );
  const before = el("button", { type: "button", onclick: () => turn(-ROWS) }, "Previous");
  const after = el("button", { type: "button", onclick: () => turn(ROWS) }, "Next");
  const place = el("span", { class: "quiet" });
  const pages = el("div", { class: "pages" }, before, after, place);
  const panel = el("div", { class: "panel" }, rows.node, pages);
  show(panel, false); // nothing is known yet
  root.append(
    el("div", { class: "titled" }, el("h1", {}, "Devices")),
    el("form", { class: "fields", role: "search", onsubmit: (event) => event.preventDefault() },
      el("label", {}, "Search", search), el("label", {}, "Show", which)),
    sum, error, panel,
  );
  let due = 0;
  let serial = 0;

  async function load() {
    due = Date.now() + AGAIN;
    const own = ++serial;
    const wanted = new URLSearchParams({ search: search.value.trim(), state: which.value, offset, last: ROWS });
    try {
      const began = Date.now();
      const found = await ask(`v1/devices?${wanted}`);
      // Of a hundred thousand devices it takes a while: then it is asked for less often.
      due = Date.now() + Math.max(AGAIN, 20 * (Date.now() - began));
      if (own !== serial) return;
      if (found.devices.length === 0 && offset > 0) {
        offset = 0;
        load();
        return;
      }
      say(error, "");
      draw(found);
    } catch (refused) {
      if (own === serial) say(error, refused.message);
    }
  }

  function draw(found) {
    const time = now();
    say(sum, `${plural(found.total, "device")}, ${count(found.connected)} of them connected${found.matching === found.total ? "" : `; ${count(found.matching)} fit`}`);
    rows.draw(
      found.devices.map((row) => ({
        key: [row, row.seen ? ago(row.seen, time) : ""],
        cells: [
          el("a", { href: `#/device/${encodeURIComponent(row.device)}` }, row.device), badge(row),
          row.seen ? el("span", { title: moment(row.seen) }, ago(row.seen, time)) : "", row.runtime ?? "",
          count(row.done), count(row.failed), count(row.lost), row.tags.join(", "),
          row.error ? el("p", { class: "clamped", title: row.error }, row.error) : "",
        ],
      })),
    );
    show(panel, true);
    show(pages, found.matching > ROWS);
    before.disabled = offset === 0;
    after.disabled = offset + ROWS >= found.matching;
    say(place, `${count(offset + 1)} to ${count(Math.min(offset + ROWS, found.matching))} of ${count(found.matching)}`);
  }

  function keep() {
    const kept = new URLSearchParams();
    if (search.value.trim()) kept.set("search", search.value.trim());
    if (which.value) kept.set("state", which.value);
    if (offset) kept.set("offset", offset);
    history.replaceState(null, "", kept.size ? `#/devices?${kept}` : "#/devices");
  }

  function turn(by) {
    offset = Math.max(0, offset + by);
    keep();
    load();
  }

  let typing = null;
  function changed() {
    offset = 0;
    clearTimeout(typing);
    typing = setTimeout(() => {
      keep();
      load();
    }, 200);
  }
  search.addEventListener("input", changed);
  which.addEventListener("change", changed);
  load();
  return {
    title: "Devices",
    topics: ["host"],
    update() {},
    tick: () => Date.now() >= due && load(),
    close: () => {
      serial += 1;
      clearTimeout(typing);
    },
  };
}

export function device(root, name) {
  const state = el("span", { class: "badge" });
  const facts = el("dl", { class: "facts" });
  const shown = {};
  const titles = ["Last seen", "Runtime", "Software", "Tier", "Tags", "Runs", "Reports that counted", "Tasks that failed", "Tasks that were lost", "Enrolled"];
  for (const title of titles) {
    shown[title] = el("dd");
    facts.append(el("div", {}, el("dt", {}, title), shown[title]));
  }
  const error = el("p", { class: "error", role: "alert" });
  const words = el("pre", {});
  const when = el("p", { class: "quiet" });
  const said = el("section", {}, el("h2", {}, "Its last error, as it said it"), el("div", { class: "panel" }, when, words));
  const tasks = table(
    "Its tasks of the last rounds, the newest first",
    [{ name: "Task" }, { name: "Run" }, { name: "Round", number: true }, { name: "State" }],
    { empty: "It had no task in the last rounds." },
  );
  const revoke = button("Revoke", `v1/devices/${encodeURIComponent(name)}/revoke`, {
    question: `Revoke ${name}?`,
    explanation: "Its credential is not valid any more, and its connection ends. It can come back only with a new token. This cannot be undone.",
    danger: true,
    done: `${name} is revoked`,
    after: () => load(),
  });
  const body = el(
    "div",
    {},
    el("div", { class: "panel" }, facts),
    said,
    el("section", {}, el("h2", {}, "Tasks"), el("div", { class: "panel" }, tasks.node)),
  );
  for (const part of [state, revoke, body]) show(part, false); // nothing is known yet
  root.append(
    el("div", { class: "titled" }, el("h1", {}, name), state,
      el("div", { class: "actions" }, ...(who().replay ? [] : [revoke]),
        el("a", { href: `v1/devices/${encodeURIComponent(name)}`, class: "quiet" }, "as JSON"))),
    error,
    body,
    el("p", {}, el("a", { href: "#/devices" }, "All devices")),
  );
  let due = 0;

  async function load() {
    due = Date.now() + AGAIN / 2;
    try {
      const row = await ask(`v1/devices/${encodeURIComponent(name)}`);
      say(error, "");
      for (const part of [state, body]) show(part, true);
      const [word, kind] = stateOf(row);
      say(state, word);
      state.className = `badge ${kind}`;
      say(shown["Last seen"], row.seen ? `${moment(row.seen)} (${ago(row.seen, now())})` : "never");
      say(shown.Runtime, row.runtime || "not said");
      say(shown.Software, row.software || "not said");
      say(shown.Tier, row.tier || "none");
      say(shown.Tags, row.tags.join(", ") || "none");
      say(shown.Runs, row.runs.join(", ") || "none");
      say(shown["Reports that counted"], count(row.done));
      say(shown["Tasks that failed"], count(row.failed));
      say(shown["Tasks that were lost"], count(row.lost));
      say(shown.Enrolled, row.enrolled ? moment(row.enrolled) : "no");
      show(revoke, row.enrolled !== null);
      show(said, Boolean(row.error));
      say(words, row.error ?? "");
      say(when, row.error_at ? moment(row.error_at) : "");
      tasks.draw((row.tasks ?? []).map((task) => ({ key: [task.task, task.state], cells: [task.task, task.member ? `${task.run}: ${task.member}` : task.run, count(task.round), task.state] })));
    } catch (refused) {
      say(error, refused.message);
    }
  }
  load();
  return { title: name, topics: ["host"], update() {}, tick: () => Date.now() >= due && load() };
}
