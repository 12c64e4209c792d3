"""A training step in a browser: the bundle in the SDK for browsers, by onnxruntime-web's own API,
and TensorFlow.js.

Each contender trains the same model from the same weights on the same batches of 20 in a worker of
headless Chromium; the losses after ten steps must agree with the Python device's, which runs in the
same turn. Each has its own profile, and two visits: the first downloads and compiles
everything, the second has the browser's caches, and is timed. All contenders run once before any
runs again. TensorFlow.js is installed by npm into a folder that is removed afterwards. It needs
Node, npm and Chromium, and what the tests need.
"""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import _measure as measure
import _models
import numpy as np
import step
from _process_usage import Usage, cpu_between, family, usage
from browser import browsing, served
from fleetlearn_protocol import open_bundle
from web_sdk import FOLDER, RUNTIME_FILES, built

HERE = Path(__file__).parent
MODELS = {"mlp": 500, "mcmahan": 30, "inverted-residual": 50}
"""Model -> steps that make a good measurement. As many are done before: browsers compile what runs
often once more."""
TENSORFLOW = "4.22.0"
COMPARED = 10
"""Steps after which the losses are compared."""
TOLERANCE = 1e-3
"""Relative difference of the losses after ten steps: TensorFlow.js rounds otherwise."""
ASK = """message => new Promise((resolve, reject) => {
  self.worker ??= new Worker(message.script, { type: "module" });
  worker.onerror = event => reject(new Error(event.message));
  worker.onmessage = ({ data }) =>
    data.error ? reject(new Error(data.error)) : resolve(data.found ?? null);
  worker.postMessage(message);
})"""
TYPES = {".wasm": "application/wasm", ".mjs": "text/javascript"}
MEMORY = "async () => (await performance.measureUserAgentSpecificMemory()).bytes"


class Contender(NamedTuple):
    """A worker's script, and what computes in it."""

    script: str
    engine: str


def contenders(threads: list[int], tensorflow: bool) -> dict[str, Contender]:
    engines = {count: "wasm" if count == 1 else f"wasm, {count} threads" for count in threads}
    found = {"own API": Contender("_web_session.js", "wasm")}
    found |= {
        f"SDK, {count} {'thread' if count == 1 else 'threads'}": Contender("step_worker.js", name)
        for count, name in engines.items()
    }
    if tensorflow:
        found["TensorFlow.js"] = Contender("_web_tensorflow.js", "wasm")
    return found


class Site(ThreadingHTTPServer):
    """Serves a folder to pages that may have threads, and keeps what was asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
        self.folder = folder
        self.asked: set[str] = set()
        self.origin = f"http://127.0.0.1:{self.server_address[1]}"

    def downloaded(self) -> float:
        """The MB of the scripts and the runtime that were asked for, gzipped."""
        files = [
            self.folder / path
            for path in self.asked
            if Path(path).suffix in (".js", ".mjs", ".wasm")
        ]
        return sum(len(gzip.compress(file.read_bytes(), 6)) for file in files) / 1e6


class Handler(SimpleHTTPRequestHandler):
    server: Site

    def do_GET(self) -> None:
        self.server.asked.add(self.path.lstrip("/"))
        super().do_GET()

    def guess_type(self, path: Any) -> str:
        return TYPES.get(Path(path).suffix) or super().guess_type(path)

    def end_headers(self) -> None:
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")
        self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
        self.send_header("Cache-Control", "max-age=3600")
        super().end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(folder: Path) -> Iterator[Site]:
    with served(Site(folder)) as site:
        yield site


def build(folder: Path, tensorflow: bool) -> None:
    """Write the workers' scripts and the runtimes' files. Raises CalledProcessError where npm's
    registry is away."""
    shutil.copy(built("browser/step_worker.js"), folder)
    for name in RUNTIME_FILES:
        shutil.copy(FOLDER / "node_modules" / "onnxruntime-web" / "dist" / name, folder)
    (folder / "index.html").write_text("<p>")
    packages = folder.parent / "packages"
    packages.mkdir()
    scripts = ["_web_session.mjs"]
    if tensorflow:
        names = [f"@tensorflow/tfjs-{name}@{TENSORFLOW}" for name in ("core", "backend-wasm")]
        (packages / "package.json").write_text("{}")
        run("npm", "install", "--no-fund", "--no-audit", "--silent", *names, cwd=packages)
        for file in (packages / "node_modules/@tensorflow/tfjs-backend-wasm/dist").glob(
            "tfjs-*.wasm"
        ):
            shutil.copy(file, folder)
        scripts.append("_web_tensorflow.mjs")
    options = (
        "--bundle",
        "--minify",
        "--format=esm",
        "--target=es2022",
        "--log-level=error",
        f"--outdir={folder}",
    )
    modules = os.pathsep.join(str(place / "node_modules") for place in (FOLDER, packages))
    run(
        str(FOLDER / "node_modules/.bin/esbuild"),
        *scripts,
        *options,
        cwd=HERE,
        env=os.environ | {"NODE_PATH": modules},
    )


def run(*command: str, **options: Any) -> None:
    subprocess.run(command, check=True, **options)


def export(name: str, folder: Path, site: Path) -> None:
    """Write the model's bundle, and beside its files its parameters and batches as the workers read
    them."""
    step.export(name, str(folder))
    bundle = site / name
    shutil.copytree(folder / f"{name}.bundle", bundle)
    opened = open_bundle(bundle)
    (bundle / "parameters.bin").write_bytes(opened.parameters().tobytes())
    _models.write_batches(name, folder / f"{name}.npz")
    with np.load(folder / f"{name}.npz") as arrays:
        for row, values in zip(opened.manifest.batch, arrays.values(), strict=True):
            (bundle / f"batch-{row.name}.bin").write_bytes(values.tobytes())


def browser_usage() -> dict[int, Usage]:
    """What the browser's processes have used: this one's and Playwright's are left out."""
    found = {}
    for pid in family(os.getpid()):
        with suppress(OSError, StopIteration):
            if b"chromium" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]:
                found[pid] = usage(pid)
    return found


def memory_of(pids: Mapping[int, Usage]) -> dict[str, float]:
    """MiB: the largest peak of a tab's process; what all processes have now, shared pages counted
    once."""
    peak, shared = 0.0, 0.0
    for pid, used in pids.items():
        with suppress(OSError):
            if b"--type=renderer" in Path(f"/proc/{pid}/cmdline").read_bytes():
                peak = max(peak, used.peak_rss)
            shared += (
                int(Path(f"/proc/{pid}/smaps_rollup").read_text().partition("\nPss:")[2].split()[0])
                / 1024
            )
    return {"peak_rss_mib": peak, "pss_mib": shared}


def visit(contender: Contender, name: str, site: Site, profile: Path, steps: int) -> dict[str, Any]:
    """Open the page, train, and return what that cost."""
    settings = {
        "script": contender.script,
        "engine": contender.engine,
        "folder": name,
        "model": name,
    }
    with browsing(profile, "--enable-blink-features=ForceEagerMeasureMemory") as browser:
        page = browser.new_page()
        page.goto(f"{site.origin}/index.html")

        def ask(do: str, **message: Any) -> Any:
            return page.evaluate(
                ASK, {"do": do, "examples": _models.BATCH, "lr": step.LR, **settings, **message}
            )

        ask("open")
        loss = ask("steps", count=COMPARED)["loss"]
        ask("steps", count=steps)
        begin = browser_usage()
        done = ask("steps", count=steps)
        end = browser_usage()
        return {
            "cpu_ms_per_step": 1e3 * cpu_between(begin, end) / steps,
            "clock_ms_per_step": done["milliseconds"] / steps,
            "loss": loss,
            "js_mib": page.evaluate(MEMORY) / 2**20,
            **memory_of(end),
        }


def contend(
    contender: Contender, name: str, site: Site, scratch: Path, steps: int
) -> dict[str, Any]:
    """Return what both visits cost; ``first``: the first one's peak."""
    profile = scratch / "profile"
    site.asked.clear()
    first = visit(contender, name, site, profile, min(steps, 20))
    costs = visit(contender, name, site, profile, steps)
    shutil.rmtree(profile)
    return {**costs, "first_peak_rss_mib": first["peak_rss_mib"], "download_mb": site.downloaded()}


def compare(
    name: str, all_of: Mapping[str, Contender], site: Site, scratch: Path, repeats: int, steps: int
) -> Any:
    """Run all contenders on one model, in turns."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for _ in range(repeats):
        arrays = scratch / f"{name}.npz"
        python = step.contend(sys.executable, "onnx", scratch / f"{name}.bundle", arrays, steps, 1)
        turn = {"Python device": python}
        for title, contender in all_of.items():
            turn[title] = figures = contend(contender, name, site, scratch, steps)
            if not abs(figures["loss"] - python["loss"]) <= TOLERANCE * abs(python["loss"]):
                raise RuntimeError(
                    f"{name}: {title} has the loss {figures['loss']}, the Python device "
                    f"{python['loss']}"
                )
            print(".", end="", flush=True, file=sys.stderr)
        before = turn["own API"]
        for title, figures in turn.items():
            for key in ("cpu", "clock"):
                figures[f"{key}_to_python"] = (
                    figures[f"{key}_ms_per_step"] / python[f"{key}_ms_per_step"]
                )
                figures[f"{key}_to_own"] = (
                    figures[f"{key}_ms_per_step"] / before[f"{key}_ms_per_step"]
                )
            runs.setdefault(title, []).append(figures)
    return {
        title: {
            key: measure.middle([row[key] for row in rows])
            for key in COLUMNS.values()
            if key in rows[0]
        }
        for title, rows in runs.items()
    }


COLUMNS = {
    "CPU-ms per step": "cpu_ms_per_step",
    "ms per step": "clock_ms_per_step",
    "CPU, to own API's": "cpu_to_own",
    "time, to own API's": "clock_to_own",
    "CPU, to Python's": "cpu_to_python",
    "peak RSS, MiB": "peak_rss_mib",
    "in the first visit": "first_peak_rss_mib",
    "JavaScript and WebAssembly, MiB": "js_mib",
    "whole browser, PSS, MiB": "pss_mib",
    "download, MB": "download_mb",
}


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--scale", type=float, default=1.0, help="times the usual number of steps")
    options.add_argument(
        "--threads", type=int, nargs="+", default=[1, 2, 4], help="of the SDK (default: 1 2 4)"
    )
    options.add_argument(
        "--no-tensorflow",
        action="store_true",
        help="without TensorFlow.js, which npm would install",
    )
    chosen = options.parse_args()
    all_of = contenders(chosen.threads, not chosen.no_tensorflow)
    results: dict[str, Any] = {}
    try:
        with measure.scratch() as scratch:
            (scratch / "site").mkdir()
            build(scratch / "site", not chosen.no_tensorflow)
            with serving(scratch / "site") as site:
                for name in chosen.models:
                    export(name, scratch, scratch / "site")
                    steps = max(1, round(MODELS[name] * chosen.scale))
                    results[name] = compare(name, all_of, site, scratch, chosen.repeats, steps)
    finally:  # what was measured before a contender failed, or before Ctrl-C
        print(file=sys.stderr)
        show(results)
    settings = {
        "repeats": chosen.repeats,
        "scale": chosen.scale,
        "batch": _models.BATCH,
        "tensorflow": TENSORFLOW,
    }
    measure.write_json(chosen.json, settings, results)


def show(results: Mapping[str, Mapping[str, Any]]) -> None:
    """Print a table of the figures."""
    rows = [("model", "contender", *COLUMNS)]
    for name, figures in results.items():
        for title, costs in figures.items():
            cells = [measure.show(costs[key]) if key in costs else "" for key in COLUMNS.values()]
            rows.append((name, title, *cells))
    print(measure.table(rows))


if __name__ == "__main__":
    main()
