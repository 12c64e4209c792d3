// Charts of our own, in SVG. A chart is drawn again when its numbers or its width change.

import { count, el, figure, say, show, svg } from "./dom.js";

const LEFT = 52;
const RIGHT = 12;
const TOP = 10;
const BOTTOM = 24;
const WIDEST = 90;

// Return at most `most` round numbers from low to high.
export function ticks(low, high, most, whole = false) {
  const span = high - low || Math.abs(high) || 1;
  const power = 10 ** Math.floor(Math.log10(span / most));
  let step = power * [1, 2, 5, 10].find((factor) => span / (power * factor) <= most);
  if (whole) step = Math.max(1, Math.round(step));
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step / 1e6; value += step) {
    found.push(Number(value.toPrecision(12)));
  }
  return found;
}

const TIMES = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];

// Return at most `most` times from low to high, in seconds, at whole seconds, minutes, hours or days.
function timeTicks(low, high, most) {
  const span = high - low;
  const step = TIMES.find((each) => span / each <= most) ?? Math.ceil(span / most / 86400) * 86400;
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high; value += step) found.push(value);
  return found;
}

// A line that has no more points than can be seen: the least and the greatest of each stretch.
function thin(points, most) {
  if (points.length <= most) return points;
  const found = [];
  const width = (2 * points.length) / most;
  for (let begin = 0; begin < points.length; begin += width) {
    const part = points.slice(Math.floor(begin), Math.floor(begin + width));
    let [least, greatest] = [0, 0];
    part.forEach(([, y], place) => {
      if (y < part[least][1]) least = place;
      if (y > part[greatest][1]) greatest = place;
    });
    const ends = least < greatest ? [least, greatest] : [greatest, least];
    found.push(part[ends[0]]);
    if (ends[0] !== ends[1]) found.push(part[ends[1]]);
  }
  return found;
}

// Return the pieces of a line: where two points are more than `gap` apart, none joins them.
function joined(points, gap) {
  if (!gap || !points.length) return [points];
  const pieces = [[points[0]]];
  for (let place = 1; place < points.length; place += 1) {
    if (points[place][0] - points[place - 1][0] > gap) pieces.push([]);
    pieces.at(-1).push(points[place]);
  }
  return pieces;
}

function frame(title, options) {
  const picture = svg("svg", { role: "img", class: "chart" });
  const legend = el("ul", { class: "legend" });
  const readout = el("p", { class: "readout", "aria-hidden": "true" });
  const numbers = el("tbody");
  const heads = el("tr");
  const details = el(
    "details",
    {},
    el("summary", {}, el("span", { class: "unseen" }, `${title}: `), "as numbers"),
    el(
      "div",
      { class: "scrolls", tabindex: "0", role: "group", "aria-label": `${title}, as numbers` },
      el(
        "table",
        {},
        el("caption", { class: "unseen" }, `${title}: the last values`),
        el("thead", {}, heads),
        numbers,
      ),
    ),
  );
  const empty = el("p", { class: "empty" }, options.empty ?? "Nothing yet.");
  const heading = el(options.heading ?? "h3", {}, title);
  const node = el("figure", { class: "panel" }, heading, legend, picture, readout, empty, details);
  return { node, picture, legend, readout, heads, numbers, details, empty };
}

function axes(picture, size, x, y, options) {
  const parts = [];
  for (const value of y.ticks) {
    const place = y.at(value);
    parts.push(
      svg("line", { class: "grid", x1: LEFT, x2: size.width - RIGHT, y1: place, y2: place }),
      svg("text", { class: "tick", x: LEFT - 6, y: place + 4, "text-anchor": "end" }, options.y(value)),
    );
  }
  x.ticks.forEach((value, number) => {
    const first = number === 0 && x.at(value) < LEFT + 20;
    const last = x.at(value) > size.width - RIGHT - 24;
    parts.push(
      svg(
        "text",
        {
          class: "tick",
          x: Math.min(size.width - 2, Math.max(LEFT, x.at(value))),
          y: size.height - 6,
          "text-anchor": first ? "start" : last ? "end" : "middle",
        },
        options.x(value),
      ),
    );
  });
  picture.append(...parts);
}

function drawLegend(legend, series) {
  const key = series.map((one) => one.name + one.colour).join("|");
  if (legend.dataset.key === key) return;
  legend.dataset.key = key;
  const sample = (one) =>
    svg(
      "svg",
      { class: "sample", viewBox: "0 0 18 10", "aria-hidden": "true" },
      one.bars
        ? svg("rect", { class: `fill c${one.colour}`, x: 3, width: 12, height: 10, rx: 2 })
        : svg("path", { class: `line c${one.colour} d${one.colour}`, d: "M0 5H18" }),
    );
  legend.replaceChildren(
    ...series.map((one) => el("li", { title: one.title ?? null }, sample(one), one.name)),
  );
  show(legend, series.length > 1 || series.some((one) => one.title));
}

// Return a chart of lines. options: x, y: how values are written; whole: whether y's are counts;
// time: whether x's are times in seconds; room: pixels for each number on the x axis;
// gap: how far apart on the x axis two points are that no line joins (0, or left out: all are joined).
export function lines(title, options = {}) {
  const parts = frame(title, options);
  const how = { x: figure, y: figure, height: 190, room: 90, ...options };
  let last = [];
  let drawn = "";

  function draw(series) {
    last = series;
    const width = Math.floor(parts.node.clientWidth - 26);
    const key = JSON.stringify([width, parts.details.open, series]);
    if (key === drawn || width < 80) return;
    drawn = key;
    const size = { width, height: how.height };
    const points = series.flatMap((one) => one.points);
    const any = points.length > 0;
    show(parts.empty, !any);
    for (const part of [parts.picture, parts.readout, parts.details]) show(part, any);
    drawLegend(parts.legend, any ? series : []);
    if (!any) return;
    const xs = points.map(([x]) => x);
    const ys = points.map(([, y]) => y);
    let [low, high] = [Math.min(...ys), Math.max(...ys)];
    if (how.zero) low = Math.min(0, low);
    if (how.whole) high = Math.max(1, high);
    if (low === high) [low, high] = low === 0 ? [0, 1] : [low - Math.abs(low) / 10, high + Math.abs(high) / 10];
    const ends = [Math.min(...xs), Math.max(...xs)];
    const x = scale(ends[0], ends[1], LEFT, width - RIGHT);
    const most = Math.max(2, Math.floor(width / how.room));
    x.ticks = how.time ? timeTicks(...ends, most) : ticks(...ends, most, how.wholeX);
    const y = scale(low, high, size.height - BOTTOM, TOP);
    y.ticks = ticks(low, high, 5, how.whole);
    parts.picture.setAttribute("viewBox", `0 0 ${width} ${size.height}`);
    parts.picture.setAttribute("height", size.height);
    parts.picture.replaceChildren();
    axes(parts.picture, size, x, y, how);
    for (const one of series) {
      const pieces = joined(one.points, how.gap).map((piece) => thin(piece, width));
      const path = pieces.flatMap((piece) =>
        piece.map(([a, b], place) => `${place ? "L" : "M"}${x.at(a).toFixed(1)} ${y.at(b).toFixed(1)}`),
      );
      parts.picture.append(svg("path", { class: `line c${one.colour} d${one.colour}`, d: path.join("") }));
      const line = pieces.flat();
      if (line.length <= 40) {
        for (const [a, b] of line) {
          parts.picture.append(svg("circle", { class: `fill c${one.colour}`, cx: x.at(a), cy: y.at(b), r: 2.5 }));
        }
      }
    }
    const newest = series.filter((one) => one.points.length);
    const words = newest.map((one) => `${one.name} ${how.y(one.points.at(-1)[1])}`).join(", ");
    parts.picture.setAttribute("aria-label", `${title}; newest: ${words}`);
    say(parts.readout, words);
    if (parts.details.open) drawNumbers(newest);
    pointer(newest, x, size);
  }

  function drawNumbers(series) {
    const rows = [...new Set(series.flatMap((one) => one.points.slice(-30).map(([a]) => a)))];
    rows.sort((a, b) => b - a);
    const known = series.map((one) => new Map(one.points.slice(-30)));
    parts.heads.replaceChildren(
      el("th", { scope: "col" }, how.xName ?? ""),
      ...series.map((one) => el("th", { scope: "col", class: "number" }, one.name)),
    );
    parts.numbers.replaceChildren(
      ...rows.slice(0, 30).map((row) =>
        el(
          "tr",
          {},
          el("th", { scope: "row" }, how.x(row)),
          known.map((one) => el("td", { class: "number" }, one.has(row) ? how.y(one.get(row)) : "")),
        ),
      ),
    );
  }

  function pointer(series, x, size) {
    parts.picture.onpointermove = (event) => {
      const box = parts.picture.getBoundingClientRect();
      const at = x.back(((event.clientX - box.left) / box.width) * size.width);
      const near = series.map((one) => closest(one.points, at));
      parts.picture.querySelector(".cursor")?.remove();
      const place = x.at(near[0][0]);
      parts.picture.append(svg("line", { class: "cursor", x1: place, x2: place, y1: TOP, y2: size.height - BOTTOM }));
      const words = series.map((one, number) => `${one.name} ${how.y(near[number][1])}`);
      say(parts.readout, `${how.xName ?? ""} ${how.x(near[0][0])}: ${words.join(", ")}`.trim());
    };
    parts.picture.onpointerleave = () => {
      parts.picture.querySelector(".cursor")?.remove();
      const words = series.map((one) => `${one.name} ${how.y(one.points.at(-1)[1])}`);
      say(parts.readout, words.join(", "));
    };
  }

  parts.details.addEventListener("toggle", () => draw(last));
  new ResizeObserver(() => draw(last)).observe(parts.node);
  return { node: parts.node, draw };
}

// Return a chart of stacked bars. draw(bars, series): bars are [{x, values: {name: number}}].
export function stacked(title, options = {}) {
  const parts = frame(title, options);
  const how = { x: figure, y: count, height: 190, ...options };
  let last = [[], []];
  let drawn = "";

  function draw(bars, series) {
    last = [bars, series];
    const width = Math.floor(parts.node.clientWidth - 26);
    const key = JSON.stringify([width, parts.details.open, bars, series]);
    if (key === drawn || width < 80) return;
    drawn = key;
    const totals = bars.map((bar) => series.reduce((sum, one) => sum + (bar.values[one.name] ?? 0), 0));
    const any = totals.some((total) => total > 0);
    show(parts.empty, !any);
    for (const part of [parts.picture, parts.readout, parts.details]) show(part, any);
    drawLegend(parts.legend, any ? series.map((one) => ({ ...one, bars: true })) : []);
    if (!any) return;
    const size = { width, height: how.height };
    const high = Math.max(1, ...totals);
    const y = scale(0, high, size.height - BOTTOM, TOP);
    y.ticks = ticks(0, high, 4, true);
    const step = Math.min(WIDEST, (width - LEFT - RIGHT) / bars.length);
    const at = (place) => LEFT + step * place;
    const every = Math.max(1, Math.ceil(bars.length / Math.max(2, Math.floor(width / 90))));
    const shown = bars.map((_, place) => place).filter((place) => place % every === 0);
    const x = { at: (place) => at(place) + step / 2, ticks: shown };
    parts.picture.setAttribute("viewBox", `0 0 ${width} ${size.height}`);
    parts.picture.setAttribute("height", size.height);
    parts.picture.replaceChildren();
    axes(parts.picture, size, x, y, { x: (place) => how.x(bars[place].x), y: how.y });
    bars.forEach((bar, place) => {
      let sum = 0;
      const words = [];
      const group = svg("g", {});
      for (const one of series) {
        const value = bar.values[one.name] ?? 0;
        if (!value) continue;
        const top = y.at(sum + value);
        group.append(
          svg("rect", {
            class: `fill c${one.colour}`,
            x: at(place) + Math.min(1, step * 0.1),
            y: top,
            width: Math.max(1, step - Math.min(2, step * 0.2)),
            height: Math.max(0.5, y.at(sum) - top),
          }),
        );
        sum += value;
        words.push(`${one.name} ${how.y(value)}`);
      }
      if (!words.length) return;
      group.addEventListener("pointerenter", () =>
        say(parts.readout, `${how.xName ?? ""} ${how.x(bar.x)}: ${words.join(", ")}`.trim()),
      );
      parts.picture.append(group);
    });
    const sums = series.map((one) => `${one.name} ${how.y(bars.reduce((sum, bar) => sum + (bar.values[one.name] ?? 0), 0))}`);
    parts.picture.setAttribute("aria-label", `${title}; in all: ${sums.join(", ")}`);
    say(parts.readout, `in all: ${sums.join(", ")}`);
    if (parts.details.open) drawNumbers(bars, series);
  }

  function drawNumbers(bars, series) {
    parts.heads.replaceChildren(
      el("th", { scope: "col" }, how.xName ?? ""),
      ...series.map((one) => el("th", { scope: "col", class: "number" }, one.name)),
    );
    parts.numbers.replaceChildren(
      ...bars.slice(-30).reverse().map((bar) =>
        el(
          "tr",
          {},
          el("th", { scope: "row" }, how.x(bar.x)),
          series.map((one) => el("td", { class: "number" }, how.y(bar.values[one.name] ?? 0))),
        ),
      ),
    );
  }

  parts.details.addEventListener("toggle", () => draw(...last));
  new ResizeObserver(() => draw(...last)).observe(parts.node);
  return { node: parts.node, draw };
}

// Return a small line without axes.
export function spark(label) {
  const picture = svg("svg", { role: "img", class: "spark", viewBox: "0 0 120 28", preserveAspectRatio: "none", "aria-label": label });
  let drawn = null;
  return {
    node: picture,
    draw(values) {
      const key = values.join(",");
      if (key === drawn) return;
      drawn = key;
      picture.setAttribute("aria-label", values.length ? `${label}: from ${figure(values[0])} to ${figure(values.at(-1))}` : `${label}: none yet`);
      if (values.length < 2) {
        picture.replaceChildren();
        return;
      }
      const x = scale(0, values.length - 1, 2, 118);
      const [low, high] = [Math.min(...values), Math.max(...values)];
      const y = low === high ? { at: () => 14 } : scale(low, high, 25, 3);
      const path = values.map((value, place) => `${place ? "L" : "M"}${x.at(place).toFixed(1)} ${y.at(value).toFixed(1)}`);
      picture.replaceChildren(svg("path", { class: "line c0", d: path.join("") }));
    },
  };
}

function scale(low, high, from, to) {
  const span = high - low || 1;
  return {
    at: (value) => from + ((value - low) / span) * (to - from),
    back: (place) => low + ((place - from) / (to - from)) * span,
  };
}

function closest(points, x) {
  let [low, high] = [0, points.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < x) low = middle;
    else high = middle;
  }
  return Math.abs(points[low][0] - x) <= Math.abs(points[high][0] - x) ? points[low] : points[high];
}
