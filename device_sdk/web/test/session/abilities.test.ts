import { expect, test } from "vitest";

import { unsupported } from "../../src/session/abilities.ts";
import { PLAIN_TASK } from "../support/tasks.ts";

test("an own encoding is given back in words: a browser has no functions of its owner's", () => {
  const encoding = { function: "thin_updates:signs", parameters: {} };
  const parts = { update: "own-132-0123456789ab" };
  const text = unsupported({ ...PLAIN_TASK, parts, encoding }, [], []);
  expect(text).toContain(
    "the task asks for the parts update (own-132-0123456789ab); this device knows update (float32",
  );
});
