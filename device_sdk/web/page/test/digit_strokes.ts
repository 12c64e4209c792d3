/** Digits as people draw them: polylines by hand, x to the right, y down. */

import type { Stroke } from "../draw/preprocess.ts";

/** Return an arc around a centre; angles in degrees, clockwise from the right. */
function arc(x: number, y: number, rx: number, ry: number, from: number, to: number): Stroke {
  return Array.from({ length: 25 }, (_, step) => {
    const angle = ((from + ((to - from) * step) / 24) * Math.PI) / 180;
    return [x + rx * Math.cos(angle), y + ry * Math.sin(angle)] as const;
  });
}

export const STROKES: Readonly<Record<number, readonly Stroke[]>> = {
  0: [arc(0.5, 0.5, 0.22, 0.35, -90, 270)],
  1: [
    [
      [0.38, 0.3],
      [0.52, 0.15],
      [0.52, 0.85],
    ],
  ],
  2: [[...arc(0.48, 0.33, 0.2, 0.18, 180, 380), [0.3, 0.82], [0.72, 0.82]]],
  3: [[...arc(0.46, 0.32, 0.2, 0.17, -150, 90), ...arc(0.46, 0.67, 0.23, 0.18, -90, 150)]],
  4: [
    [
      [0.5, 0.15],
      [0.27, 0.55],
      [0.75, 0.55],
    ],
    [
      [0.6, 0.35],
      [0.58, 0.88],
    ],
  ],
  5: [[[0.7, 0.16], [0.38, 0.16], [0.35, 0.46], ...arc(0.48, 0.63, 0.22, 0.2, -110, 150)]],
  6: [[[0.62, 0.13], [0.42, 0.35], [0.33, 0.6], ...arc(0.5, 0.67, 0.18, 0.18, 180, 530)]],
  7: [
    [
      [0.28, 0.18],
      [0.72, 0.18],
      [0.45, 0.86],
    ],
  ],
  8: [[...arc(0.5, 0.32, 0.16, 0.16, 90, -270), ...arc(0.5, 0.67, 0.2, 0.19, -90, 270)]],
  9: [[...arc(0.5, 0.34, 0.18, 0.18, 0, 360), [0.67, 0.6], [0.6, 0.86]]],
};
