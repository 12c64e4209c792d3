/**
 * By what each step of a task multiplies the learning rate (PROTOCOL.md, section 4, "Learning rate by step"): additions,
 * products and quotients alone, in this order, so that every SDK has the same bits.
 */

import type { StepSchedule } from "../protocol/messages.ts";

/** Terms of the sine's series behind the first. */
const TERMS = 11;

/** Return what the learning rate of a step is multiplied by. step: from 0. steps: how many the whole task has. */
export function factorAt(schedule: StepSchedule, step: number, steps: number): number {
  const number = schedule.first + step;
  if (number < schedule.warm_up) {
    let share = number / schedule.warm_up;
    if (schedule.kind === "one-cycle") share = 1 - halfWave(share);
    return schedule.start + (1 - schedule.start) * share;
  }
  return Math.max(schedule.least, afterWarmUp(schedule, number - schedule.warm_up, steps));
}

function afterWarmUp(schedule: StepSchedule, after: number, steps: number): number {
  const { kind, every, factor, least } = schedule;
  if (kind === "constant") return 1;
  if (kind === "step") return power(factor, Math.floor(after / every));
  if (kind === "exponential") return power(factor, after);
  const length = schedule.steps ?? Math.max(1, steps - schedule.warm_up);
  if (after >= length) return least;
  const share = after / length;
  const height = kind === "linear" ? 1 - share : halfWave(share);
  return least + (1 - least) * height;
}

/** Return (1 + cos(pi share)) / 2 for a share from 0 to 1, by the series of the sine of pi (1/2 - share). */
function halfWave(share: number): number {
  const angle = Math.PI * (0.5 - share);
  const square = angle * angle;
  let series = 1;
  for (let term = TERMS; term > 0; term--) {
    series = 1 - (square * series) / (2 * term * (2 * term + 1));
  }
  return (1 + angle * series) / 2;
}

/** Return the base to the power of a whole number, at least 0, by squaring. */
function power(base: number, exponent: number): number {
  let result = 1;
  let square = base;
  for (let rest = exponent; rest > 0; rest = Math.floor(rest / 2)) {
    if (rest % 2 === 1) result *= square;
    square *= square;
  }
  return result;
}
