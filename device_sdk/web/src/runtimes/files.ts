/** The files of onnxruntime-web, which are loaded when they are needed and are never part of a page's own script. */

/** The version of onnxruntime-web that is driven: its files must be of this one. */
export const VERSION = "1.30.0";

/** The processor's: a script, which its threads run too, and its WebAssembly beside it. */
export const WASM = "ort-wasm-simd-threaded.mjs";

/** Return the GPU's script, whose WebAssembly lies beside it: with stack switching in place of a larger file if it can. */
export function webgpuFile(): string {
  return "Suspending" in WebAssembly ? "ort.jspi.bundle.min.mjs" : "ort.webgpu.bundle.min.mjs";
}

/** Return the address of one of the files. folder: where they are. Left out: beside this script. */
export function fileAddress(name: string, folder?: string): string {
  return new URL(name, folder === undefined ? import.meta.url : new URL(folder, import.meta.url)).href;
}

/** How often a script could not be imported. */
let failures = 0;

/** Import a script of onnxruntime-web. In Node it comes from the package. Rejects with an Error that says what to do. */
// biome-ignore lint/suspicious/noExplicitAny: its files have no types
export async function importFile(name: string, folder?: string): Promise<any> {
  const inNode = import.meta.url.startsWith("file:") && folder === undefined;
  // A browser may remember that an import failed, and fails it again without a look: another address is fetched again.
  const again = failures === 0 ? "" : `?again=${failures}`;
  const address = inNode ? `onnxruntime-web/${name}` : `${fileAddress(name, folder)}${again}`;
  try {
    return await import(/* webpackIgnore: true */ /* @vite-ignore */ address);
  } catch (error) {
    failures += 1;
    throw new Error(
      `${address} of onnxruntime-web ${VERSION} could not be loaded (${(error as Error).message}); serve the files that ` +
        "README.md names beside the script, or say in `runtimeFiles` where they are",
    );
  }
}
