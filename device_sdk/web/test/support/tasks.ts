/** A task as a coordinator gives it, for tests that change what they are about. */

import type { SecureTask, Task } from "../../src/protocol/messages.ts";

export const PLAIN_TASK: Task = {
  type: "task",
  task: "t1",
  round: 3,
  bundle: "a".repeat(64),
  vectors: [{ name: "model", sha256: "b".repeat(64), size: 8, encoding: "float32", delta: null }],
  parts: { update: "float32" },
  hyper: { lr: 0.1 },
  epochs: 2,
  batch_size: 8,
  seed: 5,
  deadline: 100,
  time_budget: null,
  evaluate: false,
  algorithm: "plain",
  kept: null,
  personal_epochs: null,
  clip: null,
  local_noise: null,
  privacy: null,
  secure: null,
  schedule: null,
  function: null,
  encoding: null,
};

/** The public key of a helper. */
export const HELPER = "c".repeat(64);
export const SECURE: SecureTask = {
  mode: "helper",
  minimum: 3,
  bits: 20,
  most_weight: null,
  least_factor: null,
  helper: HELPER,
  noise: null,
  session: null,
  shares: {},
  reports: null,
};

/** A task whose update is masked with a helper. */
export const SECURE_TASK: Task = { ...PLAIN_TASK, parts: { update: "masked" }, clip: 1, secure: SECURE };
