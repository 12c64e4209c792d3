/** CRC-32 as in zlib, PNG and Ethernet: polynomial 0x04C11DB7, reflected. It is not CRC-32C. */

const TABLE = new Uint32Array(256).map((_, byte) => {
  let crc = byte;
  for (let bit = 0; bit < 8; bit++) crc = crc & 1 ? (crc >>> 1) ^ 0xedb88320 : crc >>> 1;
  return crc;
});

/** Return the CRC-32 of the bytes, an unsigned integer. `before`: the CRC-32 of the bytes before them. */
export function crc32(content: Uint8Array, before = 0): number {
  let crc = ~before;
  for (let index = 0; index < content.length; index++) crc = TABLE[(crc ^ content[index]!) & 0xff]! ^ (crc >>> 8);
  return ~crc >>> 0;
}
