import { describe, expect, test } from "vitest";
import type { StepSchedule } from "../../src/protocol/messages.ts";
import { factorAt } from "../../src/training/learning_rates.ts";
import { type Case, vectors } from "../support/vectors.ts";

describe("learning_rates.json", () => {
  test.each(vectors("learning_rates.json").factors as Case[])("$name", ({ schedule, steps, factors }) => {
    const found = Array.from({ length: steps }, (_, step) => factorAt(schedule as StepSchedule, step, steps));
    expect(found).toEqual(factors);
  });
});
