/**
 * The public keys that the device trusts, where it was given any. Without them it does any task.
 *
 * They are in the store before the device first connects with them. From then on the store decides: a start without the
 * keys does not forget them, and neither does one with a token or an option from before they were changed.
 */

import { list, object } from "../protocol/checks.ts";
import { bytes32, checked, MAX_KEYS } from "../protocol/messages.ts";
import { StoreError } from "./errors.ts";
import { json, type Store } from "./store.ts";

const KEY = "trusted";
const TRUSTED = object({ keys: list(bytes32, MAX_KEYS, 1) });

/** Return the keys, each once. Throws RangeError where one is none. */
export function checkedKeys(given: readonly string[]): readonly string[] {
  const keys = [...new Set(given)];
  try {
    return keys.length > 0 ? checked(TRUSTED, { keys }, "the keys").keys : [];
  } catch {
    throw new RangeError(
      `the keys ${keys.join(", ")} were given to be trusted; expected at most ${MAX_KEYS}, each of 64 hexadecimal ` +
        "digits, as `fleetlearn-coordinator signing-key` prints them",
    );
  }
}

/** Return the keys in the store, none where it has none. Rejects with StoreError where they are damaged. */
export async function readTrustedKeys(store: Store): Promise<readonly string[]> {
  const content = await store.read(KEY);
  if (content === undefined) return [];
  try {
    return checked(TRUSTED, JSON.parse(new TextDecoder().decode(content)), "the keys").keys;
  } catch (error) {
    throw new StoreError(
      `the keys that this device trusts are damaged in its store (${(error as Error).message}): delete the store`,
    );
  }
}

/** Trust these keys from now on, and no others. Rejects with StoreError. */
export async function writeTrustedKeys(store: Store, keys: readonly string[]): Promise<void> {
  await store.write({ [KEY]: json({ keys }) });
}

/** Return the keys that the device trusts: those in its store, or those given if it has none yet, which are then there.
 * `warn` is told of a given key that is not trusted. Rejects with StoreError. */
export async function trustFirst(
  store: Store,
  given: readonly string[],
  warn: (text: string) => void,
): Promise<readonly string[]> {
  const keys = await readTrustedKeys(store);
  if (keys.length === 0 && given.length > 0) {
    await writeTrustedKeys(store, given);
    return given;
  }
  for (const key of given.filter((one) => !keys.includes(one))) {
    warn(
      `this device trusts ${keys.join(", ")}, and goes on so: ${key} was given, and only the coordinator's signed word, ` +
        "or another store, changes keys",
    );
  }
  return keys;
}
