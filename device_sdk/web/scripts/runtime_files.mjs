// The files of onnxruntime-web's dist/ that a page serves beside its script (src/runtimes/files.ts loads them).
export const RUNTIME_FILES = ["ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm"];
// More of them, fetched only where there is a GPU: with stack switching (JSPI), and for browsers without.
export const WEBGPU_FILES = [
  "ort.jspi.bundle.min.mjs",
  "ort-wasm-simd-threaded.jspi.wasm",
  "ort.webgpu.bundle.min.mjs",
  "ort-wasm-simd-threaded.asyncify.wasm",
];
