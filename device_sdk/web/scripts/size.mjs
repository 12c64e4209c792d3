// Prints what the SDK adds to a page's download, without onnxruntime-web, and fails where that is above the limit. What is
// fetched with the first task of secure aggregation alone is counted by itself.
import { gzipSync } from "node:zlib";
import { build } from "esbuild";
import { fetchedAtOnce } from "./fetched_at_once.mjs";

const LIMITS = { "fleetlearn-web without its runtime": 60 * 1024, "what secure aggregation fetches": 24 * 1024 };
const options = { bundle: true, minify: true, format: "esm", splitting: true, external: ["onnxruntime-web"] };
const { outputFiles, metafile } = await build({
  entryPoints: ["dist/index.js"],
  outdir: "dist",
  write: false,
  metafile: true,
  ...options,
});

const atOnce = fetchedAtOnce(metafile.outputs, ["dist/index.js"]);
const later = Object.keys(metafile.outputs).filter((name) => !atOnce.includes(name));
const kib = (bytes) => (bytes / 1024).toFixed(1);
for (const [what, names] of Object.entries(LIMITS).map(([what], place) => [what, [atOnce, later][place]])) {
  const contents = outputFiles.filter(({ path }) => names.some((name) => path.endsWith(`/${name}`)));
  const size = contents.reduce((sum, file) => sum + file.contents.length, 0);
  const zipped = contents.reduce((sum, file) => sum + gzipSync(file.contents).length, 0);
  console.log(`${what}: ${kib(size)} KiB, ${kib(zipped)} KiB gzipped (limit ${kib(LIMITS[what])})`);
  if (zipped > LIMITS[what]) process.exitCode = 1;
}
