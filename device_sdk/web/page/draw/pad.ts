/** The pad: a digit drawn with finger, mouse, pen or keyboard. */

import { announce } from "../shell/elements.ts";
import { type Point, pixelsOf, SIDE, type Stroke } from "./preprocess.ts";

/** How far an arrow key moves the pen, alone and with Shift, as parts of the pad. */
const STEP = 1 / 24;
const LARGE_STEP = 1 / 8;
/** The nearest that two points of a stroke are. */
const NEAREST = 0.004;
const ARROWS: Readonly<Record<string, Point>> = {
  ArrowLeft: [-1, 0],
  ArrowRight: [1, 0],
  ArrowUp: [0, -1],
  ArrowDown: [0, 1],
};

export interface PadEvents {
  /** The drawing changed. */
  readonly changed: () => void;
  /** A digit key was pressed on the pad. */
  readonly labelled: (label: number) => void;
}

export class Pad {
  readonly #canvas: HTMLCanvasElement;
  readonly #events: PadEvents;
  #strokes: Point[][] = [];
  /** The pointer that draws, and its stroke. */
  #pointer: number | null = null;
  /** Where the keyboard's pen is, once a key was pressed. */
  #pen: { at: Point; down: boolean } | null = null;

  constructor(canvas: HTMLCanvasElement, events: PadEvents) {
    this.#canvas = canvas;
    this.#events = events;
    canvas.addEventListener("pointerdown", (event) => this.#touch(event));
    canvas.addEventListener("pointermove", (event) => this.#move(event));
    for (const name of ["pointerup", "pointercancel"] as const) {
      canvas.addEventListener(name, (event) => {
        if (event.pointerId === this.#pointer) this.#pointer = null;
      });
    }
    canvas.addEventListener("keydown", (event) => this.#press(event));
    canvas.addEventListener("blur", () => {
      this.#pen = null;
      this.#show();
    });
    new ResizeObserver(() => this.#show()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#show());
  }

  get strokes(): readonly Stroke[] {
    return this.#strokes;
  }

  undo(): void {
    this.#strokes.pop();
    this.#lift();
    this.#changed();
  }

  clear(): void {
    this.show([]);
  }

  /** Show this drawing in place of the one that is there. */
  show(strokes: readonly Stroke[]): void {
    this.#strokes = strokes.map((stroke) => [...stroke]);
    this.#lift();
    this.#changed();
  }

  // Finger, mouse, pen

  #touch(event: PointerEvent): void {
    if (this.#pointer !== null || event.button !== 0) return;
    this.#canvas.setPointerCapture(event.pointerId);
    this.#pointer = event.pointerId;
    this.#pen = null;
    this.#strokes.push([this.#place(event)]);
    this.#changed();
  }

  #move(event: PointerEvent): void {
    if (event.pointerId !== this.#pointer) return;
    const between = event.getCoalescedEvents?.() ?? [];
    for (const one of between.length > 0 ? between : [event]) this.#extend(this.#place(one));
    this.#changed();
  }

  #place(event: PointerEvent): Point {
    const { left, top, width, height } = this.#canvas.getBoundingClientRect();
    return inside((event.clientX - left) / width, (event.clientY - top) / height);
  }

  // Keyboard

  #press(event: KeyboardEvent): void {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const arrow = ARROWS[event.key];
    if (arrow !== undefined) this.#step(arrow, event.shiftKey ? LARGE_STEP : STEP);
    else if (event.key === " ") this.#toggle();
    else if (event.key === "Backspace") this.undo();
    else if (event.key === "Escape") this.clear();
    else if (/^[0-9]$/.test(event.key)) this.#events.labelled(Number(event.key));
    else return;
    event.preventDefault();
  }

  #step([x, y]: Point, step: number): void {
    const { at, down } = this.#pen ?? { at: [0.5, 0.2] as Point, down: false };
    const next = inside(at[0] + step * x, at[1] + step * y);
    this.#pen = { at: next, down };
    if (down) this.#extend(next);
    this.#changed();
  }

  #toggle(): void {
    const { at, down } = this.#pen ?? { at: [0.5, 0.2] as Point, down: false };
    this.#pen = { at, down: !down };
    if (!down) this.#strokes.push([at]);
    announce(down ? "Pen up" : "Pen down");
    this.#changed();
  }

  #lift(): void {
    this.#pointer = null;
    if (this.#pen !== null) this.#pen = { ...this.#pen, down: false };
  }

  // Both

  #extend(to: Point): void {
    const stroke = this.#strokes.at(-1);
    const last = stroke?.at(-1);
    if (stroke === undefined || last === undefined) return;
    if (Math.hypot(to[0] - last[0], to[1] - last[1]) >= NEAREST) stroke.push(to);
  }

  #changed(): void {
    this.#show();
    this.#events.changed();
  }

  #show(): void {
    const side = Math.round(this.#canvas.clientWidth * devicePixelRatio);
    if (side === 0) return; // hidden
    this.#canvas.width = side;
    this.#canvas.height = side;
    const context = this.#canvas.getContext("2d")!;
    const { ink, guide, accent } = colours(this.#canvas);
    context.scale(side, side);
    context.lineCap = "round";
    context.lineJoin = "round";
    context.strokeStyle = guide;
    context.lineWidth = 1 / side;
    context.beginPath();
    for (const part of [0.25, 0.5, 0.75]) {
      context.moveTo(part, 0);
      context.lineTo(part, 1);
      context.moveTo(0, part);
      context.lineTo(1, part);
    }
    context.stroke();
    context.strokeStyle = ink;
    context.lineWidth = 0.055;
    for (const stroke of this.#strokes) {
      context.beginPath();
      context.moveTo(...stroke[0]!);
      for (const point of stroke) context.lineTo(...point);
      context.stroke();
    }
    if (this.#pen === null) return;
    context.strokeStyle = accent;
    context.fillStyle = accent;
    context.lineWidth = 0.012;
    context.beginPath();
    context.arc(...this.#pen.at, 0.035, 0, 2 * Math.PI);
    if (this.#pen.down) context.fill();
    context.stroke();
  }
}

/** Show what the model reads, and say whether it is anything. */
export function showSeen(canvas: HTMLCanvasElement, strokes: readonly Stroke[]): void {
  const context = canvas.getContext("2d")!;
  const cell = canvas.width / SIDE;
  context.clearRect(0, 0, canvas.width, canvas.height);
  context.fillStyle = colours(canvas).ink;
  pixelsOf(strokes).forEach((value, place) => {
    context.globalAlpha = value / 16;
    context.fillRect((place % SIDE) * cell, Math.floor(place / SIDE) * cell, cell, cell);
  });
  context.globalAlpha = 1;
  canvas.setAttribute(
    "aria-label",
    strokes.length === 0 ? "What the model reads: nothing yet" : "What the model reads: your drawing in 8 by 8 squares",
  );
}

function inside(x: number, y: number): Point {
  const round = (value: number): number => Math.round(1000 * Math.min(1, Math.max(0, value))) / 1000;
  return [round(x), round(y)];
}

function colours(element: Element): { ink: string; guide: string; accent: string } {
  const style = getComputedStyle(element);
  const colour = (name: string): string => style.getPropertyValue(name).trim();
  return { ink: colour("--ink"), guide: colour("--line"), accent: colour("--accent") };
}
