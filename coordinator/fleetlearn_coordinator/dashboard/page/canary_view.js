// A canary, on the pages of both of its runs: the step, what both kinds of devices did, the bounds,
// and what can be done with it.

import { button } from "./actions.js";
import { count, duration, el, say, show, table } from "./dom.js";

const WORDS = {
  failures: "tasks that failed, of any kind",
  failed: "the device gave the task back",
  lost: "lost: vanished, late, no progress",
  refused: "the update was refused",
  interrupted: "the connection broke during the task",
  time: "training time of a task, median",
};

function percent(share) {
  return `${Number((100 * share).toPrecision(3))} %`;
}

function shown(bound, value) {
  if (value === null || value === undefined) return "";
  return bound.name === "time" ? duration(value) : percent(value);
}

function buttons(path, name) {
  const made = {
    widen: button("Widen", `${path}/canary/widen`, {
      question: "Give the canary to more devices?",
      explanation: "The next share of the devices has it at once, whatever is known of it so far.",
      danger: true,
      done: "more devices have the canary",
    }),
    back: button("Go back", `${path}/canary/back`, {
      question: "Send the canary back?",
      explanation: "All devices serve the old run again. What they trained for the canary stays in its data directory, and this canary cannot go on.",
      danger: true,
      done: "the old run has its devices again",
    }),
    finish: button("Finish", `${path}/canary/finish`, {
      question: `Let the canary take the place of ${name}?`,
      explanation: "The old run is stopped, under another name. That cannot be undone.",
      danger: true,
      done: "the canary has taken the old run's place",
    }),
  };
  return made;
}

export function canary(path, name) {
  const heading = el("h2", {}, "Canary");
  const facts = el("dl", { class: "facts" });
  const values = {};
  for (const fact of ["Canary", "Of the run", "Step", "Devices", "Model", "Since"]) {
    values[fact] = el("dd");
    facts.append(el("div", {}, el("dt", {}, fact), values[fact]));
  }
  const next = el("p", { class: "readout" });
  const acts = buttons(path, name);
  const arms = table("What devices did in this step", [
    { name: "Devices" },
    { name: "Number", number: true },
    { name: "Tasks", number: true },
    { name: "Reports", number: true },
    { name: "Interrupted", number: true },
    { name: "Ended without a report", wide: true },
  ]);
  const bounds = table("Bounds", [
    { name: "Bound" },
    { name: "Canary", number: true },
    { name: "Others", number: true },
    { name: "At most", number: true },
    { name: "State" },
  ]);
  const row = el("div", { class: "actions" }, ...Object.values(acts));
  const panel = el("div", { class: "panel" }, facts, next, row);
  const node = el("section", {}, heading, panel, arms.node, bounds.node);

  function arm(words, found) {
    const causes = Object.entries(found.causes).map(([cause, tasks]) => `${count(tasks)} ${cause}`);
    const cells = [
      words, count(found.devices), count(found.given), count(found.done), count(found.interrupted),
      causes.join(", "),
    ];
    return { key: cells, cells };
  }

  function draw(run) {
    const found = run.canary;
    show(node, Boolean(found));
    if (!found) return;
    const last = found.step === found.steps.length;
    say(values.Canary, found.name);
    say(values["Of the run"], found.of);
    say(values.Step, `${found.step} of ${found.steps.length}`);
    say(values.Devices, found.phase === "back" ? "none any more" : percent(found.share));
    say(values.Model, found.model);
    say(values.Since, new Date(found.began * 1000).toLocaleString("en-GB"));
    const ends = { back: "It went back: ", finished: "It has taken the old run's place: " };
    say(next, `${ends[found.phase] ?? "It "}${found.next}.`);
    next.classList.toggle("error", found.phase === "back");
    const goes = found.phase === "running";
    show(row, goes);
    show(acts.widen, goes && !last);
    show(acts.back, goes);
    show(acts.finish, goes && last);
    arms.draw([arm("with the canary", found.canary), arm("of the old run", found.control)]);
    bounds.draw(
      found.bounds.map((bound) => {
        const state = bound.beyond ? "beyond" : bound.canary === null ? "nothing known yet" : "within";
        const cells = [
          WORDS[bound.name] ?? bound.name, shown(bound, bound.canary), shown(bound, bound.control),
          shown(bound, bound.limit), state,
        ];
        return { key: cells, cells };
      }),
    );
  }
  return { node, draw };
}
