/** Return the names of a build's files that are fetched at once with these files: what they import, but not what they may
 * import later. outputs: of esbuild's metafile. */
export function fetchedAtOnce(outputs, names) {
  const found = new Set(names);
  for (const name of found) {
    for (const { path, kind } of outputs[name].imports)
      if (kind === "import-statement" && path in outputs) found.add(path);
  }
  return [...found];
}
