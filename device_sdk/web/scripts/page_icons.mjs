// The page's icon: an 8 x 8 digit, as the model reads it, on a square that may be cut to any shape.
import { crc32, deflateSync } from "node:zlib";

const GROUND = [11, 107, 93];
const INK = [236, 250, 246];
/** From 0 to 16, row by row. */
const DIGIT = [
  [0, 3, 11, 16, 15, 8, 0, 0],
  [0, 9, 13, 6, 9, 16, 3, 0],
  [0, 0, 0, 0, 4, 16, 5, 0],
  [0, 0, 4, 12, 16, 11, 0, 0],
  [0, 0, 3, 9, 14, 14, 3, 0],
  [0, 0, 0, 0, 1, 15, 9, 0],
  [0, 9, 9, 5, 9, 16, 6, 0],
  [0, 4, 13, 16, 14, 7, 0, 0],
];
/** What of the square the digit takes, so that a round cut leaves it whole. */
const PART = 0.58;

function mixed(value) {
  return GROUND.map((ground, channel) => Math.round(ground + ((INK[channel] - ground) * value) / 16));
}

export function iconSvg() {
  const cell = Math.floor((512 * PART) / 8);
  const begin = (512 - 8 * cell) / 2;
  const squares = DIGIT.flatMap((row, y) =>
    row.map((value, x) => {
      if (value === 0) return "";
      const place = `x="${begin + x * cell}" y="${begin + y * cell}" width="${cell}" height="${cell}"`;
      return `<rect ${place} fill="rgb(${mixed(value).join()})"/>`;
    }),
  );
  const ground = `<rect width="512" height="512" fill="rgb(${GROUND.join()})"/>`;
  return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 512 512">${ground}${squares.join("")}</svg>\n`;
}

/** Return the icon as a PNG (ISO/IEC 15948): 8-bit RGB, no filter. */
export function iconPng(side) {
  const cell = Math.floor((side * PART) / 8);
  const begin = (side - 8 * cell) / 2;
  const rows = Buffer.alloc(side * (1 + 3 * side));
  for (let y = 0; y < side; y++) {
    for (let x = 0; x < side; x++) {
      const value = DIGIT[Math.floor((y - begin) / cell)]?.[Math.floor((x - begin) / cell)] ?? 0;
      rows.set(mixed(value), y * (1 + 3 * side) + 1 + 3 * x);
    }
  }
  const header = Buffer.alloc(13);
  header.writeUInt32BE(side, 0);
  header.writeUInt32BE(side, 4);
  header.set([8, 2, 0, 0, 0], 8);
  const signature = Buffer.from([0x89, 0x50, 0x4e, 0x47, 0x0d, 0x0a, 0x1a, 0x0a]);
  const parts = [chunk("IHDR", header), chunk("IDAT", deflateSync(rows)), chunk("IEND", Buffer.alloc(0))];
  return Buffer.concat([signature, ...parts]);
}

function chunk(type, content) {
  const body = Buffer.concat([Buffer.from(type, "latin1"), content]);
  const framed = Buffer.alloc(8 + body.length);
  framed.writeUInt32BE(content.length, 0);
  framed.set(body, 4);
  framed.writeUInt32BE(crc32(body), 4 + body.length);
  return framed;
}
