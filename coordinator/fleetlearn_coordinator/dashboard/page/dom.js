// Elements and words. Whatever comes from devices becomes text, never HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) {
      node.setAttribute(name, value);
    }
  }
  const given = children.flat().filter((child) => child !== null && child !== undefined);
  node.append(...given);
  return node;
}

export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

// Set a node's text, if it is another one: an unchanged node keeps a person's selection.
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// SVG has no property "hidden", and takes the attribute.
export function show(node, visible) {
  node.toggleAttribute("hidden", !visible);
}

// Rows of a table that are replaced only where something of them changed.
export function table(caption, headings, options = {}) {
  // Roles are said, since a narrow page lays a table out as cards (style.css).
  const body = el("tbody", { role: "rowgroup" });
  const head = headings.map((heading) =>
    el("th", { scope: "col", role: "columnheader", class: heading.number ? "number" : null }, heading.name),
  );
  const node = el(
    "table",
    { role: "table" },
    el("caption", { class: options.quiet ? "unseen" : null }, caption),
    el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, head)),
    body,
  );
  const empty = el("p", { class: "empty" }, options.empty ?? "Nothing yet.");
  const frame = el(
    "div",
    { class: "scrolls cardlike", tabindex: "0", role: "group", "aria-label": caption },
    node,
  );
  let before = null;
  function draw(rows) {
    const key = JSON.stringify(rows.map((row) => row.key));
    show(empty, rows.length === 0);
    show(frame, rows.length > 0);
    if (key === before) return;
    before = key;
    body.replaceChildren(
      ...rows.map((row) =>
        el(
          "tr",
          { role: "row" },
          row.cells.map((cell, place) =>
            el(
              place === 0 ? "th" : "td",
              {
                class: headings[place].number ? "number" : headings[place].wide ? "wide" : null,
                scope: place === 0 ? "row" : null,
                role: place === 0 ? "rowheader" : "cell",
                "data-name": headings[place].name,
              },
              cell ?? "",
            ),
          ),
        ),
      ),
    );
  }
  draw([]);
  return { node: el("div", {}, frame, empty), draw };
}

// Words

export function count(value) {
  return value === null || value === undefined ? "" : Number(value).toLocaleString("en");
}

export function figure(value) {
  if (value === null || value === undefined) return "";
  if (!Number.isFinite(value)) return String(value);
  if (value !== 0 && (Math.abs(value) >= 1e6 || Math.abs(value) < 1e-3)) {
    return value.toExponential(2);
  }
  return String(Number(value.toPrecision(4)));
}

// Epsilon that was spent: rounded up, so that nobody reads less than it is, with more digits where it
// would otherwise look past a budget that it is within (fleetlearn_protocol/epsilon_text.py).
export function spentText(epsilon, budget = null) {
  if (!Number.isFinite(epsilon)) return String(epsilon);
  for (let digits = 3; digits < 17; digits++) {
    const nearest = Number(epsilon.toPrecision(digits));
    const step = 10 ** (Math.floor(Math.log10(epsilon)) - digits + 1);
    const shown = nearest < epsilon ? Number((nearest + step).toPrecision(digits)) : nearest;
    if (shown >= epsilon && (budget === null || epsilon > budget || shown <= budget)) {
      return String(shown);
    }
  }
  return String(epsilon);
}

export function bytes(value) {
  if (!value) return "0 B";
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  const power = Math.max(0, Math.min(units.length - 1, Math.floor(Math.log10(value) / 3)));
  const scaled = value / 1000 ** power;
  return `${scaled >= 100 ? Math.round(scaled) : Number(scaled.toPrecision(3))} ${units[power]}`;
}

export function duration(seconds) {
  const rest = Math.max(0, seconds);
  if (rest < 10) return `${rest.toFixed(1)} s`;
  if (rest < 120) return `${Math.round(rest)} s`;
  if (rest < 7200) return `${Math.round(rest / 60)} min`;
  if (rest < 172800) return `${Math.round(rest / 3600)} h`;
  return `${Math.round(rest / 86400)} days`;
}

export function ago(time, now) {
  return time ? `${duration(now - time)} ago` : "never";
}

// Times of a simulation are seconds since its begin.
let virtual = false;

export function setVirtual(is) {
  virtual = is;
}

function sinceBegin(time) {
  const days = Math.floor(time / 86400);
  const rest = new Date((time - days * 86400) * 1000).toISOString().slice(11, 19);
  return days ? `day ${days} ${rest.slice(0, 5)}` : rest;
}

export function clock(time) {
  if (virtual) return sinceBegin(time);
  return new Date(time * 1000).toLocaleTimeString("en-GB");
}

export function moment(time) {
  if (virtual) return sinceBegin(time);
  if (!time) return "";
  const date = new Date(time * 1000);
  return `${date.toLocaleDateString("en-CA")} ${date.toLocaleTimeString("en-GB")}`;
}

export function short(text, most = 14) {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

export function plural(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}

const CAUSES = {
  lost: "the connection ended, and the device was not back in time",
  late: "the time was over before the report was here",
  surplus: "the round had its reports without it",
  stalled: "no step and no byte for too long",
  stale: "the model that the task began from is too old",
  // of a simulation
  download: "the device was lost while it fetched the model",
  train: "the device was lost while it trained",
  upload: "the device was lost while it sent its update",
};

export function explain(cause) {
  if (cause in CAUSES) return CAUSES[cause];
  if (cause.startsWith("failed: ")) return "the device gave the task back";
  if (cause.startsWith("rejected: ")) return "the update was refused";
  return "";
}
