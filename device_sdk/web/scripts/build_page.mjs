// Writes the page for people to build/page/: any static host can serve that folder, with a page.json beside it.
import { createHash } from "node:crypto";
import { cpSync, mkdirSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { basename } from "node:path";
import { gzipSync } from "node:zlib";
import { build } from "esbuild";
import { fetchedAtOnce } from "./fetched_at_once.mjs";
import { iconPng, iconSvg } from "./page_icons.mjs";
import { RUNTIME_FILES, WEBGPU_FILES } from "./runtime_files.mjs";

const OUT = "build/page";
const RUNTIME = "node_modules/onnxruntime-web/dist";
/** The runtime's files that the workers fetch: too large for the copy that is made before anybody trains. */
const LATER = [...RUNTIME_FILES, ...WEBGPU_FILES];
/** Files from so many bytes on have a compressed one beside them, for hosts that send it. */
const WORTHWHILE = 1024;

rmSync(OUT, { recursive: true, force: true });
mkdirSync(OUT, { recursive: true });
const options = { bundle: true, minify: true, format: "esm", target: "es2022", outdir: OUT, logLevel: "error" };
const entryPoints = { page: "page/main.ts", worker: "src/worker.ts", guess_worker: "page/train/guess_worker.ts" };
const { metafile } = await build({
  ...options,
  entryPoints,
  splitting: true,
  chunkNames: "part-[hash]",
  metafile: true,
});
const scripts = Object.keys(metafile.outputs);
const first = fetchedAtOnce(
  metafile.outputs,
  Object.keys(entryPoints).map((name) => `${OUT}/${name}.js`),
);
/** What masks updates: devices outside secure aggregation never fetch it. */
const MASKING = scripts.filter((name) => !first.includes(name)).map((name) => basename(name));
await build({ ...options, entryPoints: { style: "page/style.css" } });
for (const name of ["index.html", "manifest.webmanifest"]) cpSync(`page/${name}`, `${OUT}/${name}`);
writeFileSync(`${OUT}/icon.svg`, iconSvg());
for (const side of [192, 512]) writeFileSync(`${OUT}/icon-${side}.png`, iconPng(side));

const shell = readdirSync(OUT)
  .filter((name) => !MASKING.includes(name))
  .sort()
  .map((name) => (name === "index.html" ? "./" : name));
const hash = createHash("sha256");
for (const name of readdirSync(OUT).sort()) hash.update(name).update(readFileSync(`${OUT}/${name}`));
for (const name of LATER) {
  hash.update(readFileSync(`${RUNTIME}/${name}`));
  cpSync(`${RUNTIME}/${name}`, `${OUT}/${name}`);
}
const values = { VERSION: hash.digest("hex").slice(0, 16), SHELL: shell, LATER: [...LATER, ...MASKING] };
const define = Object.fromEntries(Object.entries(values).map(([name, value]) => [name, JSON.stringify(value)]));
await build({ ...options, entryPoints: { sw: "page/shell/service_worker.ts" }, format: "iife", define });

const sizes = new Map();
for (const name of readdirSync(OUT)) {
  const content = readFileSync(`${OUT}/${name}`);
  const small = name.endsWith(".png") || content.length < WORTHWHILE ? content : gzipSync(content);
  sizes.set(name, small.length);
  if (small !== content) writeFileSync(`${OUT}/${name}.gz`, small);
}
const kib = (names) => (names.reduce((sum, name) => sum + sizes.get(name), 0) / 1024).toFixed(0);
const own = [...sizes.keys()].filter((name) => ![...LATER, ...MASKING].includes(name));
const later = `what trains ${kib(RUNTIME_FILES)} KiB, what masks updates ${kib(MASKING)} KiB`;
console.log(`${OUT}: the page is ${kib(own)} KiB gzipped, ${later}`);
