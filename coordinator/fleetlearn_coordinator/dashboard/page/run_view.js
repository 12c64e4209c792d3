// One run: the open round, what is learned, devices, causes, updates, transfers, versions,
// evaluations, what devices said; and what can be done with it.

import { button } from "./actions.js";
import { canary } from "./canary_view.js";
import { lines, stacked } from "./charts.js";
import {
  bytes, clock, count, duration, el, explain, figure, moment, plural, say, short, show, spentText, table,
} from "./dom.js";
import { ask, now, topic, who } from "./live.js";
import { stateOf } from "./runs_view.js";

const COLOURS = 8;
const BARS = 40;
const NOT_EVALUATED = "Devices take no part in evaluations here: what they measure could tell about their data.";
const NOT_RELEASED = "What devices measure is not shown: it could tell about their data.";
// What the names of metrics begin with that are drawn beside others -> in words.
const KINDS = [["personal.", "of personal models"], ["test.", "on the test data"]];
const HELD_OUT = "on held-out data";
// Seconds between two minutes' rows beyond which nobody counted devices in between.
const GAP = 130;

export function run(root, name) {
  const path = `v1/runs/${encodeURIComponent(name)}`;
  const key = `run/${name}`;
  const badge = el("span", { class: "badge" });
  const notice = el("p", { class: "notice" });
  show(notice, false);
  const acts = actions(name, path);
  root.append(
    el("div", { class: "titled" }, el("h1", {}, name), badge, acts.node),
    notice,
  );
  const parts = [
    ...(who().replay ? [] : [openRound(), canary(path, name)]), privacy(), learning(), models(), regions(), fleet(), causes(), updates(), transfers(), versions(name, path),
    evaluations(), said(),
  ];
  const replay = who().replay ? player() : null;
  const body = el("div", {}, ...parts.map((part) => part.node));
  root.append(...(replay ? [replay.node] : []), body);
  for (const part of [body, acts.node]) show(part, false); // nothing is known yet

  function update() {
    const found = topic(key);
    if (!found) return;
    if (found.ended) {
      say(notice, `There is no run called ${name}.`);
      show(notice, true);
      show(body, false);
      show(acts.node, false);
      return;
    }
    show(body, true);
    show(acts.node, !replay);
    const glance = topic("host")?.values[key] ?? {};
    const run = { ...found.values, wanted: glance.wanted, failed: glance.failed, canary: glance.canary };
    const [word, kind] = stateOf(run);
    say(badge, word);
    badge.className = `badge ${kind}`;
    const words = run.failed || run.finished || run.waits_for || "";
    say(notice, words ? words[0].toUpperCase() + words.slice(1) : "");
    show(notice, words !== "");
    notice.classList.toggle("bad", Boolean(run.failed));
    acts.draw(run);
    const shown = replay ? replay.cut(found.lists) : found.lists;
    for (const part of parts) part.draw(run, shown);
  }
  if (replay) replay.changed = update;
  return {
    title: name,
    topics: ["host", key],
    update,
    tick: () => parts.forEach((part) => part.tick?.()),
    close: () => replay?.stop(),
  };
}

function actions(name, path) {
  if (who().replay) return { node: el("div", { hidden: true }), draw() {} };
  const made = {
    resume: button("Start", `${path}/resume`, { done: `${name} goes on` }),
    pause: button("Pause", `${path}/pause`, { done: `${name} pauses: no new task is given` }),
    drain: button("Drain", `${path}/drain`, {
      question: `Drain ${name}?`,
      explanation: "The open round goes on to its end, and no other round opens. Then the run is stopped. It can be started again.",
      danger: true,
      done: `${name} is drained`,
    }),
    stop: button("Stop", `${path}/stop`, {
      question: `Stop ${name}?`,
      explanation: "Devices lose the tasks that they have now, with what they trained for them. Reports that the coordinator has stay. The run can be started again.",
      danger: true,
      done: `${name} stops`,
    }),
    evaluate: button("Evaluate", `${path}/evaluate`, { done: "an evaluation of the newest model begins" }),
  };
  const several = who().several;
  const json = el("a", { href: path, class: "quiet" }, "as JSON");
  const shown = several ? Object.values(made) : [made.evaluate];
  return {
    node: el("div", { class: "actions" }, ...shown, json),
    draw(run) {
      const stopped = run.wanted === "stopped";
      show(made.resume, stopped || run.paused || run.draining || Boolean(run.failed));
      show(made.pause, !stopped && !run.paused && !run.failed);
      show(made.drain, !stopped && !run.draining && !run.failed);
      show(made.stop, !stopped && !run.failed);
      // No evaluation of a private run is allowed, and where no model is trained there is none.
      const without = run.about?.private || run.about?.computes;
      show(made.evaluate, Boolean(run.served) && !run.finished && !without);
    },
  };
}

function section(title, ...children) {
  const heading = el("h2", {}, title);
  return el("section", {}, heading, ...children);
}

function bar(names) {
  const words = el("span");
  const value = el("span");
  const spans = names.map((one) => el("span", { class: `back${one}` }));
  const track = el("div", { class: "track", "aria-hidden": "true" }, spans);
  return {
    node: el("div", {}, el("div", { class: "bar-name" }, words, value), track),
    draw(name, text, shares) {
      say(words, name);
      say(value, text);
      shares.forEach((share, place) => {
        const width = `${(100 * Math.min(1, Math.max(0, share || 0))).toFixed(1)}%`;
        if (spans[place].style.width !== width) spans[place].style.width = width;
      });
    },
  };
}

function openRound() {
  const facts = el("dl", { class: "facts" });
  const shown = {};
  const swatches = { Received: 0, Leased: 6, Lost: 1 };
  for (const name of ["Model version", "Round", "Goal", "Received", "Leased", "Lost", "Connected"]) {
    shown[name] = el("dd");
    const colour = swatches[name];
    const swatch = colour === undefined ? "" : el("span", { class: `swatch back${colour}` });
    facts.append(el("div", {}, el("dt", {}, swatch, name), shown[name]));
  }
  const reports = bar([0, 6, 1]);
  const time = bar([7]);
  const bars = el("div", { class: "bars" }, reports.node, time.node);
  const causeLine = el("p", { class: "readout" });
  const node = section("The open round", el("div", { class: "panel" }, facts, bars, causeLine));
  let run = null;

  function draw(found) {
    run = found;
    const isOpen = run.phase === "open" && run.served;
    const lost = Object.entries(run.dropped ?? {});
    const total = lost.reduce((sum, [, value]) => sum + value, 0);
    const goal = (isOpen ? run.goal : undefined) ?? run.about?.goal;
    const share = run.about?.goal_share;
    say(shown["Model version"], run.about?.rounds ? `${count(run.version)} of ${count(run.about.rounds)}` : count(run.version));
    say(shown.Round, isOpen ? count(run.round) : "none is open");
    say(shown.Goal, share === undefined ? count(goal)
      : isOpen ? `${count(goal)} (${share} of the devices)` : `${share} of the devices, at most ${count(goal)}`);
    say(shown.Received, count(run.accepted ?? 0));
    say(shown.Leased, count(run.leases ?? 0));
    say(shown.Lost, count(total));
    say(shown.Connected, count(run.connected ?? 0));
    show(bars, isOpen);
    const out = Math.max(goal ?? 0, (run.accepted ?? 0) + (run.leases ?? 0) + total) || 1;
    reports.draw(
      "Received, leased, lost",
      `${count(run.accepted ?? 0)} of ${count(goal)} reports`,
      [run.accepted / out, run.leases / out, total / out],
    );
    say(causeLine, lost.length ? `Ended without a report: ${lost.map(([cause, value]) => `${cause} (${count(value)})`).join(", ")}` : "");
    tick();
  }

  function tick() {
    if (!run?.ends || !run.about) {
      show(time.node, false);
      return;
    }
    const left = Math.max(0, run.ends - now());
    show(time.node, true);
    time.draw("Time until the deadline", `${duration(left)} left of ${duration(run.about.deadline)}`, [1 - left / run.about.deadline]);
  }
  return { node, draw, tick };
}

// What a private run has spent of its budget.
function privacy() {
  const spent = bar([0]);
  const words = el("p", { class: "readout" });
  const node = section("Privacy", el("div", { class: "panel" }, el("div", { class: "bars" }, spent.node), words));

  function draw(run) {
    const found = run.privacy;
    show(node, Boolean(found));
    if (!found) return;
    const { epsilon, budget, delta, releases, left } = found;
    const of = budget === null ? "" : ` of ${budget}`;
    const rounds = run.about?.rounds;
    const toGo = rounds ? Math.max(0, rounds - run.version) : Infinity;
    const most = Math.min(left ?? Infinity, toGo);
    const more = Number.isFinite(most) ? `, ${count(most)} left` : "";
    spent.draw(`Epsilon ${spentText(epsilon, budget)}${of} (delta ${delta.toExponential()})`, `${plural(releases, "release")}${more}`, [budget === null ? 0 : epsilon / budget]);
    say(words, budget === null ? "The plan states no budget: the run ends by its other rules." : "The run finishes before the release that would go past its budget.");
  }
  return { node, draw };
}

// Return rows with what was sent until then, and the names of all metrics.
function learned(rows) {
  let sum = 0;
  const names = new Set();
  const found = rows.map((row) => {
    sum += row.up + row.down;
    for (const name of Object.keys(row.metrics)) names.add(name);
    return { ...row, sent: sum };
  });
  return [found, [...names]];
}

// Return the last round whose model is a version or an earlier one. A roll back makes versions that
// no round made.
function roundOf(version, rows) {
  return rows.findLast((row) => row.version !== null && row.version <= version);
}

// Return {round, metrics} for each model that was measured on held-out data, the oldest first.
function heldOut(lists, rows) {
  return lists.held_out
    .map(([version, metrics]) => ({ version, metrics, round: roundOf(version, rows) }))
    .filter((each) => each.round !== undefined)
    .sort((a, b) => a.version - b.version);
}

function learning() {
  const axis = el(
    "select",
    { onchange: () => draw(...last) },
    el("option", { value: "number" }, "rounds"),
    el("option", { value: "closed" }, "time"),
    el("option", { value: "sent" }, "bytes"),
  );
  const options = {
    number: { x: count, xName: "round", wholeX: true },
    closed: { x: clock, xName: "at", time: true },
    sent: { x: bytes, xName: "after" },
  };
  const grid = el("div", { class: "grid" });
  const note = el("p", { class: "readout" });
  const node = section("Learning", el("div", { class: "fields" }, el("label", {}, "Against", axis)), grid, note);
  const charts = new Map();
  let last = [null, null];

  function draw(run, lists) {
    last = [run, lists];
    if (!lists) return;
    const committed = lists.rounds.filter((row) => row.outcome === "committed");
    if (run.about?.computes) {
      const newest = committed.at(-1)?.computation;
      const where = newest ? `: ${newest}` : "";
      say(note, `This run computes ${run.about.computes} and trains no model${where}. “fleetlearn-coordinator result” shows what came out.`);
      return;
    }
    const [rows, found] = learned(committed);
    const names = found.filter((name) => !KINDS.some(([prefix]) => name.startsWith(prefix)));
    const measured = heldOut(lists, rows);
    const prefixed = KINDS.flatMap(([prefix]) => found.filter((name) => name.startsWith(prefix)).map((name) => name.slice(prefix.length)));
    for (const name of ["loss", ...prefixed, ...measured.flatMap((each) => Object.keys(each.metrics))]) {
      if (!names.includes(name)) names.push(name);
    }
    names.sort((a, b) => (a === "loss" ? -1 : b === "loss" ? 1 : 0));
    const hidden = run.about?.private === "none";
    for (const name of names) {
      const id = `${axis.value} ${name}`;
      if (charts.has(id)) continue;
      for (const [other, chart] of charts) {
        if (other.endsWith(` ${name}`)) {
          chart.node.remove();
          charts.delete(other);
        }
      }
      const wide = rows.length > 1 && rows.at(-1).closed - rows[0].closed > 86400;
      const own = axis.value === "closed" && wide ? { ...options.closed, x: moment, room: 150 } : options[axis.value];
      const chart = lines(name[0].toUpperCase() + name.slice(1), { ...own, empty: hidden ? NOT_RELEASED : "No round has measured it yet." });
      charts.set(id, chart);
      grid.append(chart.node);
    }
    for (const [id, chart] of charts) {
      const name = id.slice(id.indexOf(" ") + 1);
      const points = (key) => rows.filter((row) => Number.isFinite(row.metrics[key])).map((row) => [row[axis.value], row.metrics[key]]);
      const series = [{ name, colour: 0, points: points(name) }];
      KINDS.forEach(([prefix, words], place) => {
        if (!found.includes(prefix + name)) return;
        series.push({ name: words, colour: place + 1, points: points(prefix + name) });
      });
      const own = measured.filter((each) => Number.isFinite(each.metrics[name]));
      if (own.length) {
        const points = own.map((each) => [each.round[axis.value], each.metrics[name]]);
        series.push({ name: HELD_OUT, colour: 3, points });
      }
      // What devices measure in a private run has no line, so no name beside the other lines.
      if (hidden && series.length > 1) series.shift();
      const about = run.about ?? {};
      if (about.metric === name && about.target !== null && series[0].points.length) {
        const ends = [series[0].points[0][0], series[0].points.at(-1)[0]];
        series.push({ name: "target", colour: 7, points: ends.map((x) => [x, about.target]) });
      }
      chart.draw(series);
    }
    const when = rows.at(-1)?.evaluated ? "before they trained" : "while they trained";
    const noise = run.about?.private === "noised" ? ", with noise: the run is private" : "";
    const words = rows.length && !hidden ? [`Measured on the training examples of each round's own devices, ${when}${noise}.`] : [];
    if (hidden && measured.length) words.push(NOT_RELEASED); // else the chart says so
    if (measured.length) words.push(`“${HELD_OUT}”: the coordinator measures the round's new model on its own data.`);
    say(note, words.join(" "));
  }
  return { node, draw };
}

// Return rows of the last `seconds`: of each second where those are known, before that of minutes.
function spanned(lists, seconds) {
  const { samples, minutes } = lists;
  const until = samples.at(-1)?.[0] ?? minutes.at(-1)?.[0] ?? 0;
  const first = samples[0]?.[0] ?? Infinity;
  const rows = [...minutes.filter((row) => row[0] < first), ...samples];
  return rows.filter((row) => row[0] > until - seconds);
}

function fleet() {
  const span = el(
    "select",
    { onchange: () => draw(...last) },
    el("option", { value: 900 }, "the last 15 minutes"),
    el("option", { value: 3600 }, "the last hour"),
    el("option", { value: 86400 }, "the last day"),
  );
  const chart = lines("Devices", { x: clock, y: count, xName: "at", time: true, zero: true, whole: true, height: 220, gap: who().virtual ? 0 : GAP, empty: "Nothing was counted yet." });
  const fields = el("div", { class: "fields" }, el("label", {}, "Over", span));
  show(fields, !who().virtual);
  if (who().replay) span.value = 86400;
  const node = section("Devices", fields, chart.node);
  // Of a simulation nobody counted who uploads and who is silent.
  const names = ["connected", "training", ...(who().virtual ? [] : ["uploading", "silent"])];
  let last = [null, null];

  function draw(run, lists) {
    last = [run, lists];
    if (!lists) return;
    const rows = who().virtual ? lists.samples : spanned(lists, Number(span.value));
    show(node, !who().replay || rows.length > 0);
    chart.draw(
      names.map((name, place) => ({
        name,
        colour: place,
        title: name === "silent" ? "with a task, and not connected: the task waits for them" : undefined,
        points: rows.map((row) => [row[0], row[place + 1]]),
      })),
    );
  }
  return { node, draw };
}

// Return at most BARS bars of rows, and the causes in them, the most frequent first.
function binned(rows, valuesOf) {
  const width = Math.max(1, Math.ceil(rows.length / BARS));
  const bars = [];
  const sums = {};
  rows.forEach((row, place) => {
    if (place % width === 0) bars.push({ x: row.number, values: {} });
    const { values } = bars.at(-1);
    for (const [cause, value] of Object.entries(valuesOf(row))) {
      values[cause] = (values[cause] ?? 0) + value;
      sums[cause] = (sums[cause] ?? 0) + value;
    }
  });
  const causes = Object.keys(sums).sort((a, b) => sums[b] - sums[a]);
  const few = causes.slice(0, COLOURS - 1);
  if (causes.length > few.length) {
    few.push("others");
    for (const bar of bars) {
      bar.values.others = causes.slice(COLOURS - 1).reduce((sum, cause) => sum + (bar.values[cause] ?? 0), 0);
    }
  }
  return [bars, few];
}

function causes() {
  const chart = stacked("Tasks that ended without a report, by round", { x: (number) => `${count(number)}`, xName: "round", empty: "In the rounds that are over, each task had its report." });
  const rows = table("Causes, in all", [{ name: "Cause" }, { name: "Tasks", number: true }, { name: "What it means", wide: true }], { empty: "No task ended without a report." });
  const refusals = table("Messages refused", [{ name: "Code" }, { name: "Messages", number: true }], { empty: "No message was refused." });
  const colours = new Map([["surplus", 7]]); // no loss: it is not to be seen first
  if (who().replay) refusals.node.hidden = true; // records do not have them
  const node = section(
    "Refused and lost",
    el("div", { class: "grid" }, chart.node, el("div", { class: "panel" }, rows.node, refusals.node)),
  );
  function draw(run, lists) {
    const [bars, found] = binned(lists.rounds, (row) => row.dropped);
    for (const cause of found) if (!colours.has(cause)) colours.set(cause, colours.size % (COLOURS - 1));
    chart.draw(bars, found.map((cause) => ({ name: cause, colour: colours.get(cause), title: explain(cause) || undefined })));
    const sums = {};
    if (who().replay) {
      for (const row of lists.rounds) {
        for (const [cause, value] of Object.entries(row.dropped)) sums[cause] = (sums[cause] ?? 0) + value;
      }
    }
    const sorted = Object.entries(who().replay ? sums : run.causes ?? {}).filter(([, value]) => value).sort((a, b) => b[1] - a[1]);
    rows.draw(sorted.map(([cause, value]) => ({ key: [cause, value], cells: [cause, count(value), explain(cause)] })));
    const codes = Object.entries(run.refusals ?? {});
    refusals.draw(codes.map(([code, value]) => ({ key: [code, value], cells: [code, count(value)] })));
  }
  return { node, draw };
}

function updates() {
  const stale = stacked("Updates by staleness", { xName: "versions behind:", x: (value) => String(value), empty: "No update has counted since the coordinator began." });
  const tiers = stacked("Updates by tier", { xName: "tier", x: short, empty: "No update has counted since the coordinator began." });
  const node = section("Updates", el("div", { class: "grid" }, stale.node, tiers.node));
  function draw(run) {
    const bars = Object.entries(run.staleness ?? {}).map(([x, value]) => ({ x, values: { updates: value } }));
    stale.draw(bars, [{ name: "updates", colour: 0 }]);
    show(stale.node, !who().replay || bars.length > 0);
    const found = Object.entries(run.tiers ?? {}).sort((a, b) => b[1] - a[1]).slice(0, 12);
    const named = found.map(([tier, value]) => ({ x: tier || "no tier", values: { updates: value } }));
    tiers.draw(named, [{ name: "updates", colour: 2 }]);
    show(tiers.node, !who().replay || named.length > 0);
    if (who().replay) show(node, bars.length + named.length > 0);
  }
  return { node, draw };
}

function transfers() {
  const chart = lines("Bytes a second", { x: clock, y: bytes, xName: "at", time: true, zero: true, whole: true });
  const rounds = lines("Bytes of a round", { x: count, y: bytes, xName: "round", zero: true, whole: true, wholeX: true });
  const facts = el("p", { class: "readout" });
  const node = section("Transfers", el("div", { class: "grid" }, chart.node, rounds.node), facts);
  function draw(run, lists) {
    const seconds = lists.samples;
    show(chart.node, !who().replay);
    show(facts, !who().replay);
    chart.draw([
      { name: "received", colour: 0, points: seconds.map((row) => [row[0], row[6]]) },
      { name: "sent", colour: 1, points: seconds.map((row) => [row[0], row[7]]) },
    ]);
    rounds.draw([
      { name: "received", colour: 0, points: lists.rounds.map((row) => [row.number, row.up]) },
      { name: "sent", colour: 1, points: lists.rounds.map((row) => [row.number, row.down]) },
    ]);
    const [up, down] = run.bytes ?? [0, 0];
    const places = run.served && run.uploading !== undefined ? `; ${plural(run.uploading, "upload")} under way, ${count(run.queued ?? 0)} wait` : "";
    say(facts, `Since the coordinator began: received ${bytes(up)}, sent ${bytes(down)}${places}.`);
  }
  return { node, draw };
}

function versions(name, path) {
  const rows = table(
    "The versions of the model that are kept, the newest first",
    [
      { name: "Version", number: true }, { name: "Made" }, { name: "By" }, { name: "Kept as" },
      { name: "Measured", wide: true }, { name: "Size", number: true }, { name: "Go back" },
    ],
    { empty: "There is no model yet." },
  );
  const error = el("p", { class: "error" });
  const node = section("Versions", el("div", { class: "panel" }, rows.node, error));
  let seen = null;
  let asking = false;

  async function draw(run) {
    const state = `${run.version} ${run.served}`;
    if (state === seen || asking || who().models === false) return;
    asking = true;
    try {
      const found = await ask(`${path}/models`);
      seen = state;
      say(error, "");
      const newest = found.at(-1)?.version;
      rows.draw(found.reverse().map((row) => ({ key: [row.version, row.kept, row.metrics, newest], cells: cells(row, newest) })));
    } catch (refused) {
      say(error, refused.message);
    } finally {
      setTimeout(() => {
        asking = false;
      }, 2000);
    }
  }

  function cells(row, newest) {
    const values = (metrics) => Object.entries(metrics).map(([key, value]) => `${key} ${figure(value)}`);
    const measured = Object.entries(row.metrics)
      .filter(([, metrics]) => Object.keys(metrics).length)
      .map(([source, metrics]) => `${source}: ${values(metrics).join(", ")}`);
    const by = row.restores !== null ? `roll back to ${row.restores}` : row.round === null ? "the bundle" : `round ${row.round}`;
    const back = row.version === newest || who().replay
      ? ""
      : button("Roll back", `${path}/roll-back`, {
        body: { version: row.version },
        question: `Roll ${name} back to version ${row.version}?`,
        explanation: `The model of version ${row.version} becomes the newest version. What devices trained for the open round is given up.`,
        danger: true,
        done: `${name} goes on from version ${row.version}`,
      });
    return [count(row.version), moment(row.made), by, row.kept ?? "", measured.join("; "), bytes(row.size), back];
  }
  if (who().models === false) node.hidden = true;
  return { node, draw };
}

// The members of a family: what each has to do now, and what its devices measured last.
function models() {
  const rows = table(
    "Models: running tasks, and the last committed round",
    [
      { name: "Model" }, { name: "Tasks", number: true }, { name: "Reports", number: true },
      { name: "Measured", wide: true }, { name: "Change", number: true },
    ],
  );
  const node = section("Models", el("div", { class: "panel" }, rows.node));
  function draw(run, lists) {
    const last = [...lists.rounds].reverse().find((row) => row.outcome === "committed");
    const names = Object.keys(run.members ?? last?.members ?? {});
    show(node, names.length > 0);
    const found = names.map((name) => ({ name, tasks: run.members?.[name] ?? 0, ...last?.members?.[name] }));
    rows.draw(
      found.map((row) => ({
        key: [row.name, row.tasks, last?.number],
        cells: [
          row.name, count(row.tasks), count(row.reports ?? 0),
          Object.entries(row.metrics ?? {}).map(([key, value]) => `${key} ${figure(value)}`).join(", "),
          row.change === undefined ? "" : figure(row.change),
        ],
      })),
    );
  }
  return { node, draw };
}

// The regions of rounds: what each has now, and how its part of the last round ended.
function regions() {
  const rows = table(
    "Regions: the open round, and the last one that is over",
    [
      { name: "Region" }, { name: "State" }, { name: "Reports", number: true }, { name: "Goal", number: true },
      { name: "Minimum", number: true }, { name: "Tasks", number: true }, { name: "Waiting", number: true },
      { name: "Last round" },
    ],
  );
  const node = section("Regions", el("div", { class: "panel" }, rows.node));
  const state = (run, region) => {
    if (region.done !== null) return region.done ? "done" : "failed";
    return run.phase === "open" ? "open" : "";
  };
  function draw(run, lists) {
    const last = lists.rounds[lists.rounds.length - 1];
    const found = run.regions ?? [];
    show(node, found.length > 0);
    rows.draw(
      found.map((region) => {
        const before = last?.regions?.[region.name];
        const ended = before ? `${count(before.reports)} reports, ${before.done ? "done" : "failed"}` : "";
        return {
          key: [...Object.values(region), last?.number],
          cells: [
            region.name, state(run, region), count(region.reports), count(region.goal), count(region.minimum),
            count(region.tasks), count(region.waiting), ended,
          ],
        };
      }),
    );
  }
  return { node, draw };
}

function evaluations() {
  const rows = table(
    "Evaluations on devices' own training examples, the newest first",
    [
      { name: "Number", number: true }, { name: "Version", number: true }, { name: "Outcome" },
      { name: "Ended" }, { name: "Devices", number: true }, { name: "Examples", number: true },
      { name: "Measured", wide: true },
    ],
    { empty: "The model was not evaluated on devices yet." },
  );
  const open = el("p", { class: "notice" });
  const note = el("p", { class: "readout" }, NOT_EVALUATED);
  const panel = el("div", { class: "panel" }, rows.node);
  const node = section("Evaluations", open, note, panel);
  function draw(run, lists) {
    const one = run.evaluation;
    say(open, one ? `Evaluation ${one.number} of version ${one.version} is under way: ${one.devices} of ${one.of} devices have measured.` : "");
    show(open, Boolean(one));
    const found = [...lists.evaluations].reverse().slice(0, 50);
    const isPrivate = Boolean(run.about?.private);
    show(note, isPrivate);
    show(panel, !isPrivate || found.length > 0);
    show(node, !run.about?.computes);
    if (who().replay) show(node, found.length > 0);
    rows.draw(
      found.map((row) => ({
        key: row.number,
        cells: [
          count(row.number), count(row.version), row.valid ? "valid" : "invalid", moment(row.closed),
          count(row.devices), count(row.examples),
          Object.entries(row.metrics).map(([key, value]) => `${key} ${figure(value)}`).join(", "),
        ],
      })),
    );
  }
  return { node, draw };
}

function said() {
  const rows = table(
    "What devices said of failed tasks, and what was refused, the newest first",
    [{ name: "When" }, { name: "Device" }, { name: "What" }, { name: "In words", wide: true }],
    { empty: "No device has said anything since the coordinator began." },
  );
  const node = section("What devices said", el("div", { class: "panel" }, rows.node));
  function draw(run, lists) {
    const found = [...(lists.notes ?? [])].reverse().slice(0, 50);
    if (who().replay) show(node, found.length > 0);
    rows.draw(
      found.map(([time, device, cause, text], place) => ({
        key: [time, device, cause, found.length - place],
        cells: [moment(time), el("a", { href: `#/device/${encodeURIComponent(device)}` }, device), cause, el("p", { class: "clamped", title: text }, text)],
      })),
    );
  }
  return { node, draw };
}

// What a folder says, again: up to a moment that a person chooses, or as if it went on now.
function player() {
  const range = el("input", { type: "range", min: 0, max: 1000, value: 1000, step: 1, "aria-label": "Moment of the run" });
  const words = el("span", { class: "quiet" });
  const play = el("button", { type: "button" }, "Play");
  const node = el("div", { class: "fields" }, play, el("label", { class: "moment" }, "Moment", range), words);
  const own = { node, changed: () => {}, cut, stop };
  let timer = null;
  let ends = [0, 0];

  function stop() {
    clearInterval(timer);
    timer = null;
    say(play, "Play");
  }
  play.addEventListener("click", () => {
    if (timer !== null) {
      stop();
      return;
    }
    if (Number(range.value) >= 1000) range.value = 0;
    say(play, "Stop");
    timer = setInterval(() => {
      range.value = Number(range.value) + 4;
      own.changed();
      if (Number(range.value) >= 1000) stop();
    }, 100);
  });
  range.addEventListener("input", () => own.changed());

  function cut(lists) {
    const rows = lists.rounds;
    if (!rows.length) return lists;
    ends = [rows[0].opened, rows.at(-1).closed];
    const until = ends[0] + ((ends[1] - ends[0]) * Number(range.value)) / 1000;
    say(words, `${duration(until - ends[0])} of ${duration(ends[1] - ends[0])}`);
    if (Number(range.value) >= 1000) return lists;
    const versions = heldOut(lists, rows).filter((each) => each.round.closed <= until);
    return {
      ...lists,
      held_out: versions.map((each) => [each.version, each.metrics]),
      rounds: rows.filter((row) => row.closed <= until),
      evaluations: lists.evaluations.filter((row) => row.closed <= until),
      samples: lists.samples.filter((row) => row[0] <= until),
      minutes: lists.minutes.filter((row) => row[0] <= until),
      notes: lists.notes.filter((row) => row[0] <= until),
    };
  }
  return own;
}

