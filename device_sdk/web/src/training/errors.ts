/** Why a training or an evaluation came to no result. */

import type { FailureCode } from "../protocol/messages.ts";

/** `code` is what the coordinator is told. `endsDevice`: the next task would fail as well. */
export class TrainingError extends Error {
  override name = "TrainingError";
  readonly code: FailureCode;

  constructor(code: FailureCode, text: string) {
    super(text);
    this.code = code;
  }

  get endsDevice(): boolean {
    return this.code === "bad-data";
  }
}

/** The owner asked to stop. The work is dropped. */
export class StoppedError extends Error {
  override name = "StoppedError";
}

/** The data do not fit the bundle's batch. The text says what was given and what was expected. */
export class DataError extends TrainingError {
  override name = "DataError";

  constructor(text: string) {
    super("bad-data", text);
  }
}
