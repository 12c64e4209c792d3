// Prints what the SDK adds to a page's download, without onnxruntime-web, and fails where that is above the limit.
import { gzipSync } from "node:zlib";
import { build } from "esbuild";

const LIMIT = 60 * 1024;
const options = { bundle: true, minify: true, format: "esm", external: ["onnxruntime-web"], write: false };
const { outputFiles } = await build({ entryPoints: ["dist/index.js"], ...options });
const [{ contents }] = outputFiles;
const size = gzipSync(contents).length;
const kib = (bytes) => (bytes / 1024).toFixed(1);
console.log(
  `fleetlearn-web without its runtime: ${kib(contents.length)} KiB, ${kib(size)} KiB gzipped (limit ${kib(LIMIT)})`,
);
process.exit(size > LIMIT ? 1 : 0);
