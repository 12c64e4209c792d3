// All runs at a glance, and how the coordinator's process is.

import { lines, spark } from "./charts.js";
import { bytes, clock, count, duration, el, figure, moment, plural, say, show, table } from "./dom.js";
import { now, topic, who } from "./live.js";

const PREFIX = "run/";

// Return a run's state in a word, and how it is to be shown.
export function stateOf(run) {
  if (run.failed) return ["failed", "bad"];
  if (run.finished) return ["finished", "good"];
  if (run.recorded) return ["not finished", ""];
  if (run.wanted === "stopped") return ["stopped", ""];
  if (run.paused) return ["paused", "warn"];
  if (run.draining) return ["draining", "warn"];
  if (!run.served) return ["not served", "warn"];
  return ["running", "good"];
}

function card(name) {
  const badge = el("span", { class: "badge" });
  const facts = el("p");
  const metrics = el("p", { class: "quiet" });
  const waits = el("p", { class: "quiet" });
  const line = spark("loss of the last rounds");
  const link = el("a", { href: `#/run/${encodeURIComponent(name)}` }, name);
  const node = el("li", { class: "card" }, el("h2", {}, link, badge), facts, line.node, metrics, waits);
  return {
    node,
    draw(run) {
      const [word, kind] = stateOf(run);
      say(badge, word);
      badge.className = `badge ${kind}`;
      const rounds = run.of ? `version ${count(run.version)} of ${count(run.of)}` : `version ${count(run.version ?? 0)}`;
      const open = run.phase === "open" ? `, round ${count(run.round)}: ${count(run.accepted)} of ${count(run.goal)} reports` : "";
      say(facts, run.served && !run.recorded ? `${rounds}${open}; ${plural(run.connected ?? 0, "device")} connected` : run.version !== undefined ? rounds : "");
      const words = Object.entries(run.metrics ?? {}).map(([key, value]) => `${key} ${figure(value)}`);
      say(metrics, words.join(", "));
      say(waits, run.failed || run.finished || run.waits_for || "");
      waits.classList.toggle("error", Boolean(run.failed));
      for (const part of [facts, metrics, waits]) show(part, part.textContent !== "");
      line.draw(run.spark ?? []);
      show(line.node, (run.spark ?? []).length > 1);
    },
  };
}

function gatewayRow(gateway) {
  const cells = [
    gateway.name || String(gateway.number),
    String(gateway.process),
    count(gateway.devices),
    count(gateway.connections),
    bytes(gateway.bytes_up),
    bytes(gateway.bytes_down),
    `${figure(Math.round(10000 * gateway.lag) / 10)} ms`,
  ];
  return { key: cells.join(" "), cells };
}

export function runs(root) {
  const cards = new Map();
  const list = el("ul", { class: "cards" });
  const empty = el("p", { class: "empty" }, "This coordinator has no runs yet. “fleetlearn-coordinator run add” adds one.");
  show(empty, false);
  const facts = el("dl", { class: "facts" });
  const fact = (name) => {
    const value = el("dd");
    facts.append(el("div", {}, el("dt", {}, name), value));
    return value;
  };
  const shown = {
    connected: fact("Devices connected"),
    up: fact("Running for"),
    lag: fact("Event loop's lag"),
    memory: fact("Memory"),
    cpu: fact("CPU"),
    address: fact("Devices connect to"),
    software: fact("Software"),
  };
  const lag = lines("Event loop's lag", { y: (value) => `${figure(value)} ms`, x: clock, xName: "at", time: true, zero: true });
  const memory = lines("Memory", { y: bytes, x: clock, xName: "at", time: true, zero: true });
  const gateways = table(
    "Gateways: processes that hold the devices' connections",
    ["Gateway", "Process", "Devices", "Connections", "Received", "Sent", "Event loop's lag"].map((name) => ({ name, number: true })),
  );
  const holding = el("div", { class: "panel below" }, gateways.node);
  show(holding, false);
  const process = el(
    "section",
    {},
    el("h2", {}, "The coordinator"),
    el("div", { class: "panel" }, facts),
    holding,
    el("div", { class: "grid below" }, lag.node, memory.node),
  );
  root.append(el("div", { class: "titled" }, el("h1", {}, "Runs")), list, empty, process);
  if (who().replay) process.hidden = true;

  function update() {
    const host = topic("host");
    if (!host || host.ended) return;
    const found = Object.keys(host.values).filter((key) => key.startsWith(PREFIX)).sort();
    for (const key of [...cards.keys()].filter((key) => !found.includes(key))) {
      cards.get(key).node.remove();
      cards.delete(key);
    }
    found.forEach((key, place) => {
      if (!cards.has(key)) {
        cards.set(key, card(key.slice(PREFIX.length)));
        list.insertBefore(cards.get(key).node, list.children[place] ?? null);
      }
      cards.get(key).draw(host.values[key]);
    });
    show(empty, found.length === 0);
    const holders = host.values.gateways ?? [];
    show(holding, holders.length > 0);
    gateways.draw(holders.map(gatewayRow));
    const rows = host.lists.process ?? [];
    const last = rows.at(-1);
    say(shown.connected, count(host.values.connected));
    say(shown.up, host.values.began ? duration(now() - host.values.began) : "");
    say(shown.address, host.values.address ?? "");
    say(shown.software, host.values.software ?? "");
    say(shown.lag, last ? `${figure(last[1])} ms` : "");
    say(shown.memory, last?.[2] ? bytes(last[2]) : "");
    say(shown.cpu, last ? `${Math.round(100 * last[3])} % of a core` : "");
    lag.draw([{ name: "lag", colour: 0, points: rows.map((row) => [row[0], row[1]]) }]);
    memory.draw([{ name: "memory", colour: 0, points: rows.filter((row) => row[2]).map((row) => [row[0], row[2]]) }]);
  }
  return { title: "Runs", topics: ["host"], update, moment };
}
