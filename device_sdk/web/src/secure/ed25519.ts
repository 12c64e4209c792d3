/** Signatures with a key that is kept as bytes, for browsers whose WebCrypto has no Ed25519 (RFC 8032). */

import { ed25519 } from "@noble/curves/ed25519.js";

/** Return a new private key: 32 random bytes. */
export function newSecret(): Uint8Array {
  return ed25519.utils.randomSecretKey();
}

export function publicKeyOf(secret: Uint8Array): Uint8Array {
  return ed25519.getPublicKey(secret);
}

export function sign(secret: Uint8Array, content: Uint8Array): Uint8Array {
  return ed25519.sign(content, secret);
}
