/**
 * Checks of JSON values: each takes a value and where it stands, and returns the value as its type says. Fields that an
 * object's check does not know are left out, so that a later version may add some.
 */

/** Why a value is not what it must be; `readJson` and `checked` make a ProtocolError of it. */
export class Mismatch extends Error {}

export interface Check<T> {
  (value: unknown, place: string): T;
  /** The value of a field that is left out. A check without it is of a field that must be there. */
  readonly fallback?: () => T;
}
export type Checked<C> = C extends Check<infer T> ? T : never;
type Fields = Record<string, Check<unknown>>;
type Shape<F extends Fields> = { [Name in keyof F]: Checked<F[Name]> };

const LARGEST = 2 ** 53 - 1;

function expected(what: string, place: string): never {
  throw new Mismatch(`expected ${what} at ${place}`);
}

function isObject(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** A string of `least` to `most` characters (code points), or of a pattern for the whole string. */
export function text(most: number, least = 0): Check<string> {
  return (value, place) => {
    if (typeof value !== "string") return expected("a string", place);
    const length = value.length <= most && value.length >= 2 * least ? value.length : [...value].length;
    return length <= most && length >= least ? value : expected(`${least} to ${most} characters`, place);
  };
}

export function pattern(wanted: RegExp): Check<string> {
  return (value, place) => {
    if (typeof value !== "string" || !wanted.test(value)) return expected(`a string that matches ${wanted}`, place);
    return value;
  };
}

export function oneOf<const T extends string>(words: readonly T[]): Check<T> {
  return (value, place) => (words.includes(value as T) ? (value as T) : expected(`one of ${words.join(", ")}`, place));
}

export const flag: Check<boolean> = (value, place) =>
  typeof value === "boolean" ? value : expected("true or false", place);

export function number(least = -1e30, most = 1e30): Check<number> {
  return (value, place) =>
    typeof value === "number" && value >= least && value <= most
      ? value
      : expected(`a number from ${least} to ${most}`, place);
}

export function integer(least = 0, most = LARGEST, multiple = 1): Check<number> {
  return (value, place) =>
    Number.isInteger(value) &&
    (value as number) >= least &&
    (value as number) <= most &&
    (value as number) % multiple === 0
      ? (value as number) + 0 // -0 becomes 0
      : expected(`an integer from ${least} to ${most}`, place);
}

export function nullable<T>(check: Check<T>): Check<T | null> {
  return (value, place) => (value === null ? null : check(value, place));
}

export function list<T>(check: Check<T>, most: number, least = 0): Check<readonly T[]> {
  return (value, place) => {
    if (!Array.isArray(value) || value.length > most || value.length < least) {
      return expected(`an array of ${least} to ${most} entries`, place);
    }
    return value.map((one, index) => check(one, `${place}[${index}]`));
  };
}

/** An object from names to values. */
export function record<T>(key: Check<string>, check: Check<T>, most: number, least = 0): Check<Record<string, T>> {
  return (value, place) => {
    if (!isObject(value)) return expected("an object", place);
    const entries = Object.entries(value);
    if (entries.length > most || entries.length < least) return expected(`${least} to ${most} entries`, place);
    // fromEntries defines each entry, so that one named __proto__ is an entry like any other.
    return Object.fromEntries(entries.map(([name, one]) => [key(name, place), check(one, `${place}.${name}`)]));
  };
}

export function object<F extends Fields>(fields: F): Check<Shape<F>> {
  return (value, place) => {
    if (!isObject(value)) return expected("an object", place);
    const entries: [string, unknown][] = [];
    for (const [name, check] of Object.entries(fields)) {
      if (Object.hasOwn(value, name))
        entries.push([name, check(value[name], place === "" ? name : `${place}.${name}`)]);
      else if (check.fallback === undefined) return expected(`the field ${name}`, place || "the message");
      else entries.push([name, check.fallback()]);
    }
    return Object.fromEntries(entries) as Shape<F>;
  };
}

/** Any JSON value. */
export const anything: Check<unknown> = (value) => value;

/** A field that may be left out. */
export function optional<T, D extends T>(check: Check<T>, fallback: D): Check<T> {
  return Object.assign((value: unknown, place: string) => check(value, place), { fallback: () => fallback });
}

/** The value, which must be this one. */
export function literal<const T extends string>(word: T): Check<T> {
  return oneOf([word]);
}
