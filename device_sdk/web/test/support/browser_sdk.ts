/** The SDK for tests that call its parts in a page of a browser. */

export { findVerifier } from "../../src/driver/signatures.ts";
export * from "../../src/index.ts";
export { signedBytes } from "../../src/protocol/signing.ts";
