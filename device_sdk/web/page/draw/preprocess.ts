/**
 * From a drawing to what the model reads: 8 x 8 values from 0 to 16, the way of scikit-learn's digits.
 *
 * That data set's scans were scaled to bitmaps of 32 x 32; each value counts the ink in a block of 4 x 4 (E. Alpaydin and
 * C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998). Its digits fill the
 * whole height, are centred, and have about the same ink whatever the digit: 0.305 of the bitmap on average.
 */

/** A place on the pad: x to the right, y down, both from 0 to 1. */
export type Point = readonly [number, number];
/** What the pen drew between touching the pad and leaving it. */
export type Stroke = readonly Point[];

/** Values along each side of what the model reads. */
export const SIDE = 8;
/** The largest value. */
export const FULL = 16;
const BLOCK = 4;
const BITMAP = SIDE * BLOCK;
/** The widest that a digit becomes; the data set's digits leave the first and the last column almost empty. */
const WIDEST = 26;
/** Pixels of ink that a digit should have, and the thinnest and thickest pen for it, in pixels of the bitmap. */
const INK = 0.305 * BITMAP * BITMAP;
const THINNEST = 4.5;
const THICKEST = 7;

/** Return the 32 x 32 bitmap of a drawing, row by row: 1 where there is ink. */
export function bitmapOf(strokes: readonly Stroke[]): Uint8Array {
  const { placed, pen } = scaled(strokes);
  const bitmap = new Uint8Array(BITMAP * BITMAP);
  for (const stroke of placed) {
    stroke.forEach((end, place) => {
      ink(bitmap, stroke[Math.max(0, place - 1)]!, end, pen / 2);
    });
  }
  return bitmap;
}

/** Return what the model reads of a drawing: 64 values from 0 to 16, row by row. All are 0 where nothing was drawn. */
export function pixelsOf(strokes: readonly Stroke[]): Uint8Array {
  const pixels = new Uint8Array(SIDE * SIDE);
  bitmapOf(strokes).forEach((inked, place) => {
    const row = Math.floor(place / BITMAP / BLOCK);
    const column = Math.floor((place % BITMAP) / BLOCK);
    pixels[row * SIDE + column]! += inked;
  });
  return pixels;
}

/** Scale the strokes to the bitmap, centred, and choose the pen that gives them the data set's ink. */
function scaled(strokes: readonly Stroke[]): { placed: Stroke[]; pen: number } {
  const xs = strokes.flatMap((stroke) => stroke.map(([x]) => x));
  const ys = strokes.flatMap((stroke) => stroke.map(([, y]) => y));
  const [left, right, top, bottom] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const length = strokes.reduce((sum, stroke) => sum + lengthOf(stroke), 0);
  let pen = THINNEST;
  let scale = 1;
  // The pen's thickness takes part of the room, and follows from the scale: the second pass is close enough.
  for (let pass = 0; pass < 2; pass++) {
    const fits = Math.min((BITMAP - pen) / (bottom - top), (WIDEST - pen) / (right - left));
    scale = Number.isFinite(fits) ? fits : 1; // a dot
    pen = Math.min(THICKEST, Math.max(THINNEST, INK / (length * scale)));
  }
  const placed = strokes.map((stroke) =>
    stroke.map(
      ([x, y]) =>
        [BITMAP / 2 + scale * (x - (left + right) / 2), BITMAP / 2 + scale * (y - (top + bottom) / 2)] as const,
    ),
  );
  return { placed, pen };
}

function lengthOf(stroke: Stroke): number {
  return stroke
    .slice(1)
    .reduce((sum, [x, y], place) => sum + Math.hypot(x - stroke[place]![0], y - stroke[place]![1]), 0);
}

/** Ink the pixels whose centres are within this radius of the line. */
function ink(bitmap: Uint8Array, [beginX, beginY]: Point, [endX, endY]: Point, radius: number): void {
  const [alongX, alongY] = [endX - beginX, endY - beginY];
  const square = alongX * alongX + alongY * alongY;
  const first = (one: number, other: number): number => Math.max(0, Math.floor(Math.min(one, other) - radius));
  const last = (one: number, other: number): number => Math.min(BITMAP, Math.ceil(Math.max(one, other) + radius));
  for (let row = first(beginY, endY); row < last(beginY, endY); row++) {
    for (let column = first(beginX, endX); column < last(beginX, endX); column++) {
      const [x, y] = [column + 0.5 - beginX, row + 0.5 - beginY];
      const nearest = square === 0 ? 0 : Math.min(1, Math.max(0, (x * alongX + y * alongY) / square));
      if (Math.hypot(x - nearest * alongX, y - nearest * alongY) <= radius) bitmap[row * BITMAP + column] = 1;
    }
  }
}
