/** Kinds of exchanges: what a question of each kind holds, and what the reply does (PROTOCOL.md, 4). */

import { type Check, object } from "./checks.ts";
import { checked, evaluation, type Question, type Reply } from "./messages.ts";

export interface ExchangeKind {
  /** The content of a question. */
  readonly question: Check<unknown>;
  /** The content of a reply. */
  readonly reply: Check<unknown>;
  /** Names of the vectors that a question sends. If there are any, it names a bundle too. */
  readonly vectors: readonly string[];
}

/** Name of a kind -> what its messages hold. */
export const EXCHANGE_KINDS: Record<string, ExchangeKind> = {
  evaluation: { question: object({}), reply: evaluation, vectors: ["model"] },
};

/** Return the message's content as its kind says. Throws ProtocolError (bad-message). */
export function contentOf(message: Question | Reply): unknown {
  const kind = Object.hasOwn(EXCHANGE_KINDS, message.kind) ? EXCHANGE_KINDS[message.kind] : undefined;
  const check = kind === undefined ? object({}) : kind[message.type];
  return checked(check, message.content, `the content of a ${message.type} of the kind ${message.kind}`);
}
