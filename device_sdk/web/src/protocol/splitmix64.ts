/**
 * SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014): random numbers that
 * are the same in every language. A 64-bit number is two halves of 32 bits, since bigint is some fifty times slower.
 */

/** The stream of a seed that roundings are drawn from. Smaller numbers are epochs, whose streams order the examples. */
export const ROUNDING = 2 ** 32;

/** The numbers mix(s + GAMMA), mix(s + 2 GAMMA), ... of the state s = mix(mix(seed) + stream). */
export class SplitMix64 {
  /** The halves of the last number: integers from 0 to 2^32 - 1. */
  high = 0;
  low = 0;
  #stateHigh: number;
  #stateLow: number;

  /** seed, stream: integers from 0 to 2^53 - 1. */
  constructor(seed: number, stream: number) {
    this.#mix(Math.floor(seed / 2 ** 32), seed >>> 0);
    const low = this.low + (stream >>> 0);
    this.#mix((this.high + Math.floor(stream / 2 ** 32) + (low >= 2 ** 32 ? 1 : 0)) >>> 0, low >>> 0);
    this.#stateHigh = this.high;
    this.#stateLow = this.low;
  }

  /** Set `high` and `low` to the next number. */
  next(): void {
    const low = this.#stateLow + 0x7f4a7c15; // GAMMA = 0x9E3779B97F4A7C15
    this.#stateHigh = (this.#stateHigh + 0x9e3779b9 + (low >= 2 ** 32 ? 1 : 0)) >>> 0;
    this.#stateLow = low >>> 0;
    this.#mix(this.#stateHigh, this.#stateLow);
  }

  #mix(high: number, low: number): void {
    this.#multiply(high ^ (high >>> 30), low ^ ((low >>> 30) | (high << 2)), 0xbf58476d, 0x1ce4e5b9);
    high = this.high;
    low = this.low;
    this.#multiply(high ^ (high >>> 27), low ^ ((low >>> 27) | (high << 5)), 0x94d049bb, 0x133111eb);
    high = this.high;
    low = this.low;
    this.high = (high ^ (high >>> 31)) >>> 0;
    this.low = (low ^ ((low >>> 31) | (high << 1))) >>> 0;
  }

  /** Set `high` and `low` to the product of two numbers, modulo 2^64. */
  #multiply(aHigh: number, aLow: number, bHigh: number, bLow: number): void {
    const a0 = aLow & 0xffff;
    const a1 = aLow >>> 16;
    const b0 = bLow & 0xffff;
    const b1 = bLow >>> 16;
    const middle = a1 * b0 + ((a0 * b0) >>> 16);
    const carried = a0 * b1 + (middle & 0xffff);
    const upper = a1 * b1 + Math.floor(middle / 0x10000) + Math.floor(carried / 0x10000);
    this.high = (upper + Math.imul(aHigh, bLow) + Math.imul(aLow, bHigh)) >>> 0;
    this.low = Math.imul(aLow, bLow) >>> 0;
  }
}

/** Random fractions below 1, multiples of 2^-32: the lower half of each number of the seed's stream, then its upper. */
export class Fractions {
  #numbers: SplitMix64;
  #upperIsNext = false;

  constructor(seed: number) {
    this.#numbers = new SplitMix64(seed, ROUNDING);
  }

  next(): number {
    this.#upperIsNext = !this.#upperIsNext;
    if (this.#upperIsNext) this.#numbers.next();
    return (this.#upperIsNext ? this.#numbers.low : this.#numbers.high) * 2 ** -32;
  }
}
