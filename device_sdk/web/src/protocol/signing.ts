/** What is signed where a coordinator signs its tasks (PROTOCOL.md, section 4, "Signed tasks"). */

const BEGIN = "fleetlearn.v1 signed message";
const encoder = new TextEncoder();

/**
 * Return the bytes that are signed: three lines, then the message's JSON.
 *
 * challenge: of the device's check-in on this connection. device: its name. message: as in `signed.message`.
 */
export function signedBytes(challenge: string, device: string, message: string): Uint8Array<ArrayBuffer> {
  return encoder.encode([BEGIN, challenge, device, message].join("\n"));
}
