/**
 * Checks Ed25519 signatures (RFC 8032) with the browser's own WebCrypto. No library of our own stands in where it cannot:
 * each browser that updates itself can (Chromium from 137, Firefox from 129, Safari from 17), and on a page without
 * HTTPS, where there is no WebCrypto, whoever changes tasks on the way could as well change the page.
 */

import { ProtocolError } from "../protocol/errors.ts";
import { fromHex } from "../protocol/hex.ts";

/** (public key, signature, content) -> whether the key's owner signed the content. Keys and signatures are in hex. */
export type Verify = (key: string, signature: string, content: Uint8Array<ArrayBuffer>) => Promise<boolean>;

/** The public key of RFC 8032, section 7.1, test 1: what a browser must be able to import. */
const SOME_KEY = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a";

/** Return what checks signatures. Rejects with ProtocolError (bad-version) where this browser or page cannot. */
export async function findVerifier(): Promise<Verify> {
  const subtle = globalThis.crypto?.subtle as SubtleCrypto | undefined; // it is not there on pages without HTTPS
  const read = (key: string): Promise<CryptoKey> => {
    if (subtle === undefined) throw new Error("crypto.subtle is not there");
    return subtle.importKey("raw", fromHex(key), "Ed25519", false, ["verify"]);
  };
  try {
    await read(SOME_KEY);
  } catch (error) {
    const what =
      subtle === undefined
        ? "the page must come over HTTPS, or from this machine"
        : `this browser has no Ed25519 (${(error as Error).message}): expected Chromium 137, Firefox 129, Safari 17 or newer`;
    throw new ProtocolError("bad-version", `this device trusts only signed tasks, and to check signatures ${what}`);
  }
  return async (key, signature, content) => {
    try {
      return await subtle!.verify("Ed25519", await read(key), fromHex(signature), content);
    } catch {
      return false; // the key is no point of the curve
    }
  };
}
