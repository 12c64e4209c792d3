// Writes the page for people to build/page/: any static host can serve that folder, with a page.json beside it.
import { createHash } from "node:crypto";
import { cpSync, mkdirSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { gzipSync } from "node:zlib";
import { build } from "esbuild";
import { iconPng, iconSvg } from "./page_icons.mjs";

const OUT = "build/page";
const RUNTIME = "node_modules/onnxruntime-web/dist";
/** The runtime's files that the workers fetch: too large for the copy that is made before anybody trains. */
const RUNTIME_FILES = ["ort-wasm-simd-threaded.wasm"];

rmSync(OUT, { recursive: true, force: true });
mkdirSync(OUT, { recursive: true });
const options = { bundle: true, minify: true, format: "esm", target: "es2022", outdir: OUT, logLevel: "error" };
await build({
  ...options,
  entryPoints: { page: "page/main.ts", worker: "src/worker.ts", guess_worker: "page/train/guess_worker.ts" },
});
await build({ ...options, entryPoints: { style: "page/style.css" } });
for (const name of ["index.html", "manifest.webmanifest"]) cpSync(`page/${name}`, `${OUT}/${name}`);
writeFileSync(`${OUT}/icon.svg`, iconSvg());
for (const side of [192, 512]) writeFileSync(`${OUT}/icon-${side}.png`, iconPng(side));

const shell = readdirSync(OUT)
  .sort()
  .map((name) => (name === "index.html" ? "./" : name));
const hash = createHash("sha256");
for (const name of readdirSync(OUT).sort()) hash.update(name).update(readFileSync(`${OUT}/${name}`));
for (const name of RUNTIME_FILES) {
  hash.update(readFileSync(`${RUNTIME}/${name}`));
  cpSync(`${RUNTIME}/${name}`, `${OUT}/${name}`);
}
const values = { VERSION: hash.digest("hex").slice(0, 16), SHELL: shell, LATER: RUNTIME_FILES };
const define = Object.fromEntries(Object.entries(values).map(([name, value]) => [name, JSON.stringify(value)]));
await build({ ...options, entryPoints: { sw: "page/shell/service_worker.ts" }, format: "iife", define });

const sizes = shell.map((name) => gzipSync(readFileSync(`${OUT}/${name === "./" ? "index.html" : name}`)).length);
const kib = (sizes.reduce((sum, size) => sum + size, 0) / 1024).toFixed(0);
console.log(`${OUT}: the page is ${kib} KiB gzipped, without the runtime (${RUNTIME_FILES.join(", ")})`);
