/** Kinds of exchanges: what a question of each kind holds, and what the reply does (PROTOCOL.md, 4). */

import { type Check, list, number, object } from "./checks.ts";
import { checked, evaluation, examples, identifier, MAX_VECTORS, type Question, type Reply } from "./messages.ts";

export interface ExchangeKind {
  /** The content of a question. */
  readonly question: Check<unknown>;
  /** The content of a reply. */
  readonly reply: Check<unknown>;
  /** Names of the vectors that a question sends. If there are any, it names a bundle too. */
  readonly vectors: readonly string[];
  /** The field of a question's content that has the names of the vectors instead. */
  readonly listed?: string;
}

/** The content of a question of the kind `fit`: the names of its vectors, each of them a model. */
export interface FitQuestion {
  readonly models: readonly string[];
}

/** The content of the reply: the mean loss of each model, in the question's order. */
export interface FitAnswer {
  readonly examples: number;
  readonly losses: readonly number[];
}

/** Name of a kind -> what its messages hold. */
export const EXCHANGE_KINDS: Record<string, ExchangeKind> = {
  evaluation: { question: object({}), reply: evaluation, vectors: ["model"] },
  fit: {
    question: object({ models: list(identifier, MAX_VECTORS, 1) }),
    reply: object({ examples, losses: list(number(), MAX_VECTORS, 1) }),
    vectors: [],
    listed: "models",
  },
};

/** Return the names of the vectors that a question sends, whose content is right. */
export function vectorsOf(question: Question): readonly string[] {
  const { listed, vectors } = EXCHANGE_KINDS[question.kind]!;
  return listed === undefined ? vectors : (question.content[listed] as readonly string[]);
}

/** Return the message's content as its kind says. Throws ProtocolError (bad-message). */
export function contentOf(message: Question | Reply): unknown {
  const kind = Object.hasOwn(EXCHANGE_KINDS, message.kind) ? EXCHANGE_KINDS[message.kind] : undefined;
  const check = kind === undefined ? object({}) : kind[message.type];
  return checked(check, message.content, `the content of a ${message.type} of the kind ${message.kind}`);
}
