/** The device's name and its credential: random, made by the device, and durable before anybody is shown them. */

import { nullable, object, optional, text } from "../protocol/checks.ts";
import { checked, identifier } from "../protocol/messages.ts";
import { StoreError } from "./errors.ts";
import { json, keepFirst, readJson, type Store } from "./store.ts";

const IDENTITY = object({ device: identifier });
/** A secret, and behind dots the public keys that its device is to trust. */
const TOKEN = /^([A-Za-z0-9_-]{43,128})((?:\.[0-9a-f]{64})*)$/;
const CREDENTIAL = object({ secret: text(128, 43), next: optional(nullable(text(128, 43)), null) });

/** Return the device's name; make it `name`, or a random one, where the store has none. */
export async function readOrMakeName(store: Store, name?: string): Promise<string> {
  if ((await readJson(store, "identity")) === undefined) {
    const made = json({ device: checked(identifier, name ?? randomText(16), "a device's name") });
    // A page may ask for the name while its worker makes one: the first is kept, unless it is damaged.
    const kept = await keepFirst(store, "identity", made);
    if (!isJson(kept)) await store.write({ identity: made });
  }
  const { device } = checked(IDENTITY, await readJson(store, "identity"), "the store's identity");
  if (name !== undefined && name !== device) {
    throw new StoreError(
      `the store says that this device is ${device}, not ${name}: leave the name out, or give ${name} a store of its own`,
    );
  }
  return device;
}

/** Return a token's secret, and the public keys that come with it. Throws RangeError if this cannot be a token; the text
 * does not have it: it is a secret. */
export function readToken(token: string): { secret: string; keys: readonly string[] } {
  const parts = TOKEN.exec(token);
  if (parts === null) {
    throw new RangeError(
      `the token that was given cannot be one: it has ${token.length} characters. Expected 43 to 128 letters, digits, ` +
        "- and _, and keys behind dots if there are any, with no space or line end, as `fleetlearn-coordinator enrol` " +
        "prints it",
    );
  }
  return { secret: parts[1]!, keys: parts[2]!.split(".").slice(1) };
}

/** What the device shows of itself when it connects, as subprotocols: a browser can set no headers (PROTOCOL.md, 1). */
export class Enrolment {
  readonly #store: Store;
  readonly #device: string;
  #token: string | undefined;
  #announced: string | null = null;

  /** token: what enrols the device, if it is given one; the device then makes itself a credential. */
  constructor(store: Store, device: string, token?: string) {
    this.#store = store;
    this.#device = device;
    this.#token = token;
  }

  /** Return the subprotocols of the next handshake beside the protocol's; none where the device has no credential. */
  async subprotocols(): Promise<string[]> {
    let credential = await this.#read();
    if (credential === undefined) {
      if (this.#token === undefined) return [];
      credential = { secret: randomText(32), next: null };
      await this.#store.write({ credential: json(credential) });
    }
    this.#announced = credential.next;
    return [
      `fleetlearn.credential.${credential.secret}`,
      `fleetlearn.device.${this.#device}`,
      ...(this.#token === undefined ? [] : [`fleetlearn.token.${this.#token}`]),
      ...(credential.next === null ? [] : [`fleetlearn.next.${credential.next}`]),
    ];
  }

  /** The coordinator has accepted the handshake: it knows the credential, and the next one. */
  async accepted(): Promise<void> {
    this.#token = undefined;
    if (this.#announced === null) return;
    await this.#store.write({ credential: json({ secret: this.#announced, next: null }) });
    this.#announced = null;
  }

  /** Make the credential that the device changes to at its next connection. */
  async rotate(): Promise<void> {
    const credential = await this.#read();
    if (credential === undefined) throw new StoreError("the store has no credential: the device is not enrolled");
    await this.#store.write({
      credential: json({ secret: credential.secret, next: credential.next ?? randomText(32) }),
    });
  }

  async #read(): Promise<{ secret: string; next: string | null } | undefined> {
    const stored = await readJson(this.#store, "credential");
    return stored === undefined ? undefined : checked(CREDENTIAL, stored, "the store's credential");
  }
}

function isJson(content: Uint8Array): boolean {
  try {
    JSON.parse(new TextDecoder().decode(content));
    return true;
  } catch {
    return false;
  }
}

/** Return random bytes in base64url. The first is a letter or a digit, as a name's must be. */
function randomText(bytes: number): string {
  const random = crypto.getRandomValues(new Uint8Array(bytes));
  const coded = btoa(String.fromCharCode(...random))
    // base64url (RFC 4648, section 5) without padding: a subprotocol's name takes no "=" and no
    // "/".
    .replaceAll("+", "-")
    .replaceAll("/", "_")
    .replace(/=+$/, "");
  return /^[A-Za-z0-9]/.test(coded) ? coded : randomText(bytes);
}
