/** Why a training or an evaluation came to no result. */

import { ProtocolError } from "../protocol/errors.ts";
import type { FailureCode } from "../protocol/messages.ts";
import { StoreError } from "../storage/errors.ts";

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

/** The data do not fit the bundle's batch. The text says what was given and what was expected. */
export class DataError extends TrainingError {
  override name = "DataError";

  constructor(text: string) {
    super("bad-data", text);
  }
}

/**
 * Return what an error says, in one line. Of one that is not ours, such as an exception of the code that gives the data,
 * also the type and where it was thrown: `TypeError: x is undefined (in mydata.js line 12)`.
 */
export function inOneLine(error: unknown): string {
  if (!(error instanceof Error)) return String(error);
  const text = error.message.replace(/\s+/g, " ").trim();
  const ours = error instanceof TrainingError || error instanceof StoreError || error instanceof ProtocolError;
  if (ours && text !== "") return text;
  const described = error.name === "Error" && text !== "" ? text : [error.name, text].filter(Boolean).join(": ");
  // "at load (https://host/mydata.js:12:5)" in Chrome and Node, "load@https://host/mydata.js:12:5" in Firefox and Safari.
  const thrown = /([^\s/\\(@?]+)(?:\?\S*)?:(\d+):\d+\)?$/m.exec(error.stack?.replace(error.message, "") ?? "");
  return thrown === null ? described : `${described} (in ${thrown[1]} line ${thrown[2]})`;
}
