/** Bytes as hexadecimal digits, as keys, challenges and signatures travel. */

export function toHex(content: Uint8Array): string {
  return Array.from(content, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Return the bytes of an even number of digits, which were checked before. */
export function fromHex(digits: string): Uint8Array<ArrayBuffer> {
  return Uint8Array.from(digits.match(/../g) ?? [], (pair) => Number.parseInt(pair, 16));
}
