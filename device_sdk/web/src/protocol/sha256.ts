/**
 * SHA-256 (FIPS 180-4). A page that came over http has no crypto.subtle, and phones on a local network often have no
 * other address of their coordinator; so it is here.
 */

/** The first 32 bits of the fractional parts of the cube roots (square roots) of the first primes. */
const [ROUNDS, INITIAL] = constants();

function constants(): [Uint32Array, Uint32Array] {
  const primes: number[] = [];
  for (let candidate = 2; primes.length < 64; candidate++) {
    if (primes.every((prime) => candidate % prime !== 0)) primes.push(candidate);
  }
  // The root of prime * 2^(32 power), rounded down, by integers alone: its lower 32 bits are the fraction's first 32.
  const root = (prime: number, power: bigint): number => {
    const wanted = BigInt(prime) << (32n * power);
    let found = 0n;
    for (let bit = 1n << 40n; bit > 0n; bit >>= 1n) if ((found + bit) ** power <= wanted) found += bit;
    return Number(found & 0xffffffffn);
  };
  return [
    Uint32Array.from(primes, (prime) => root(prime, 3n)),
    Uint32Array.from(primes.slice(0, 8), (prime) => root(prime, 2n)),
  ];
}

/** Return the SHA-256 of the bytes in lower-case hexadecimal. */
export function sha256(content: Uint8Array): string {
  const state = new Int32Array(INITIAL);
  const words = new Int32Array(64);
  const whole = content.length - (content.length % 64);
  compress(state, words, content, whole);
  const tail = new Uint8Array(content.length - whole < 56 ? 64 : 128);
  tail.set(content.subarray(whole));
  tail[content.length - whole] = 0x80;
  new DataView(tail.buffer).setBigUint64(tail.length - 8, 8n * BigInt(content.length));
  compress(state, words, tail, tail.length);
  return [...state].map((word) => (word >>> 0).toString(16).padStart(8, "0")).join("");
}

function compress(state: Int32Array, words: Int32Array, content: Uint8Array, end: number): void {
  for (let start = 0; start < end; start += 64) {
    for (let i = 0, place = start; i < 16; i++, place += 4) {
      words[i] =
        (content[place]! << 24) | (content[place + 1]! << 16) | (content[place + 2]! << 8) | content[place + 3]!;
    }
    for (let i = 16; i < 64; i++) {
      const x = words[i - 15]!;
      const y = words[i - 2]!;
      const s0 = ((x >>> 7) | (x << 25)) ^ ((x >>> 18) | (x << 14)) ^ (x >>> 3);
      const s1 = ((y >>> 17) | (y << 15)) ^ ((y >>> 19) | (y << 13)) ^ (y >>> 10);
      words[i] = (words[i - 16]! + s0 + words[i - 7]! + s1) | 0;
    }
    let [a, b, c, d, e, f, g, h] = state as unknown as [number, number, number, number, number, number, number, number];
    for (let i = 0; i < 64; i++) {
      const s1 = ((e >>> 6) | (e << 26)) ^ ((e >>> 11) | (e << 21)) ^ ((e >>> 25) | (e << 7));
      const t1 = (h + s1 + ((e & f) ^ (~e & g)) + ROUNDS[i]! + words[i]!) | 0;
      const s0 = ((a >>> 2) | (a << 30)) ^ ((a >>> 13) | (a << 19)) ^ ((a >>> 22) | (a << 10));
      const t2 = (s0 + ((a & b) ^ (a & c) ^ (b & c))) | 0;
      h = g;
      g = f;
      f = e;
      e = (d + t1) | 0;
      d = c;
      c = b;
      b = a;
      a = (t1 + t2) | 0;
    }
    state[0] = state[0]! + a;
    state[1] = state[1]! + b;
    state[2] = state[2]! + c;
    state[3] = state[3]! + d;
    state[4] = state[4]! + e;
    state[5] = state[5]! + f;
    state[6] = state[6]! + g;
    state[7] = state[7]! + h;
  }
}
