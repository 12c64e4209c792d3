/** Whose tasks a device trains: where it was given public keys, only those that one of them signed. */

import { ProtocolError } from "../protocol/errors.ts";
import { type Question, readFromCoordinator, type Signed, type Task, type Trust } from "../protocol/messages.ts";

export const WRONG_SIGNATURE =
  "its signature is wrong: it was changed on the way, or signed for another device or at another time";

/** Return the message in `signed`. Throws ProtocolError where it is none, or none that is signed. */
export function messageIn(signed: Signed): Task | Question | Trust {
  const message = readFromCoordinator(signed.message);
  if (message.type === "task" || message.type === "question" || message.type === "trust") return message;
  throw new ProtocolError("out-of-turn", "a message was signed that is no task, question or trust");
}

/** Return why a key does not count, for people; null if the device trusts it. */
export function strange(key: string, trusted: readonly string[]): string | null {
  return trusted.includes(key) ? null : `it is signed with the key ${key}; this device trusts ${trusted.join(", ")}`;
}
