/** What a masked update is about, in bytes: a device seals its seed about them, and signs them (about.py). */

import { joined } from "../protocol/deltas.ts";
import { fromHex } from "../protocol/hex.ts";
import { sha256 } from "../protocol/sha256.ts";

const ABOUT = "fleetlearn.v1 masked update";
const SIGNED = "fleetlearn.v1 signed seed";
const encoder = new TextEncoder();

/** What the masked updates of one sum have in common. Each device signs it. */
export interface MaskTerms {
  /** The helper's public X25519 key, 64 hexadecimal digits. */
  readonly helper: string;
  /** The run's name. */
  readonly run: string;
  /** SHA-256 of the bundle's manifest. */
  readonly bundle: string;
  /** Elements of an update as it is masked, the weight included. */
  readonly size: number;
  /** The fewest different devices whose updates may be added up. */
  readonly minimum: number;
  /** SHA-256 of what is trained, and how: `trainingDigest` (task_terms.ts). */
  readonly training: string;
  /** Whether all of these updates are of one round, and began from one model. */
  readonly oneModel: boolean;
}

/** Which update of which device it is. */
export interface MaskedUpdate {
  readonly device: string;
  readonly task: string;
  readonly round: number;
  /** SHA-256 of the model that the training began from. */
  readonly model: string;
}

/** Return the parts one after the other, each with its length before it (4 bytes, big-endian). */
export function lengthPrefixed(parts: readonly Uint8Array[]): Uint8Array<ArrayBuffer> {
  return joined(
    parts.flatMap((part) => {
      const length = new Uint8Array(4);
      new DataView(length.buffer).setUint32(0, part.length);
      return [length, part];
    }),
  );
}

/** Return what a device's seed is sealed about. Numbers are decimal digits, text is UTF-8, `oneModel` is 1 or 0. */
export function aboutUpdate(terms: MaskTerms, update: MaskedUpdate): Uint8Array<ArrayBuffer> {
  const words = [terms.run, terms.bundle, terms.size, terms.minimum, terms.training, Number(terms.oneModel)];
  const named = [update.device, update.task, update.round, update.model];
  const texts = [...words, ...named].map((word) => encoder.encode(String(word)));
  return lengthPrefixed([encoder.encode(ABOUT), fromHex(terms.helper), ...texts]);
}

/** Return the bytes that a device signs (Ed25519). about: as `aboutUpdate` returns. sealed: the seed, sealed. */
export function signedSeed(about: Uint8Array, sealed: Uint8Array): Uint8Array<ArrayBuffer> {
  return lengthPrefixed([encoder.encode(SIGNED), about, fromHex(sha256(sealed))]);
}
