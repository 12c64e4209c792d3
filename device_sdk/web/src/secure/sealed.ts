/**
 * Bytes that only the holder of a private key can open, such as a mask's seed for the helper.
 *
 * X25519 (RFC 7748) with a key of one use, HKDF-SHA-256 (RFC 5869), and ChaCha20-Poly1305 (RFC 8439); sealed.py of the
 * protocol's package says more. Browsers have no ChaCha20, and not all have X25519, so all of it is of one library.
 */

import { chacha20poly1305 } from "@noble/ciphers/chacha.js";
import { x25519 } from "@noble/curves/ed25519.js";
import { hkdf } from "@noble/hashes/hkdf.js";
import { sha256 } from "@noble/hashes/sha2.js";
import { lengthPrefixed } from "./about.ts";

const LABEL = new TextEncoder().encode("fleetlearn.v1 sealed");
/** Each key is used once. */
const NONCE = new Uint8Array(12);

/**
 * Return `content` sealed for the holder of the private key of `recipient`, 48 bytes longer than it.
 *
 * about: what is bound in and not sent. own: the private key of one use, for test vectors alone. Throws Error where
 * `recipient` is a key of small order, which is nobody's.
 */
export function seal(
  content: Uint8Array,
  recipient: Uint8Array,
  about: Uint8Array,
  own: Uint8Array = x25519.utils.randomSecretKey(),
): Uint8Array {
  const key = x25519.getPublicKey(own);
  const info = lengthPrefixed([LABEL, about, key, recipient]);
  const secret = hkdf(sha256, x25519.getSharedSecret(own, recipient), undefined, info, 32);
  const closed = chacha20poly1305(secret, NONCE, about).encrypt(content);
  const sealed = new Uint8Array(key.length + closed.length);
  sealed.set(key);
  sealed.set(closed, key.length);
  return sealed;
}
