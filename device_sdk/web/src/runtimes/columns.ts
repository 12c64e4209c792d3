/** Arrays of examples, as a runtime takes them. */

export type Numbers =
  | Float32Array
  | Float64Array
  | Int8Array
  | Int16Array
  | Int32Array
  | Uint8Array
  | Uint8ClampedArray
  | Uint16Array
  | Uint32Array
  | BigInt64Array;

/** Numbers in row-major order. The first axis counts the examples. */
export interface Column {
  readonly values: Numbers;
  readonly shape: readonly number[];
}
