"""A Debian for 64-bit ARM on a machine of another architecture, and the device in it.

The packages of one release's Python are fetched with apt's own client from the mirror that this
machine has, and unpacked, not installed; the device and what it needs come as aarch64 wheels alone.
qemu runs their programs on an emulated Cortex-A72, the core of a Raspberry Pi 4. All is kept in
``.arm64/`` at the root of the repository.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from filelock import FileLock

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".arm64"
QEMU = "qemu-aarch64-static"
PYTHONS = {"bookworm": "3.11", "trixie": "3.13"}
"""Debian's release -> its Python. Raspberry Pi OS has the same."""
PACKAGES = ("python3-minimal", "libpython3-stdlib", "libstdc++6")
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
APT = """
Dir::State "{folder}/state";
Dir::State::status "{folder}/state/status";
Dir::Cache "{folder}/cache";
Dir::Etc::sourcelist "{folder}/sources.list";
Dir::Etc::sourceparts "-";
APT::Architecture "arm64";
APT::Architectures {{ "arm64"; }};
APT::Install-Recommends "false";
APT::Sandbox::User "";
"""
OLD_QEMU = "onnxruntime<1.27"
"""qemu 7.2 runs ONNX Runtime up to 1.26; 10.0 runs all that were tried, up to 1.31."""


class UnavailableError(Exception):
    """This machine cannot run ARM's programs, or cannot fetch them."""


def qemu_version() -> tuple[int, ...]:
    """Return qemu's version. Raises UnavailableError."""
    if shutil.which(QEMU) is None:
        raise UnavailableError(f"there is no {QEMU}: Debian's package qemu-user-static has it")
    said = subprocess.run([QEMU, "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"version (\d+)\.(\d+)", said)
    assert match is not None, said
    return tuple(map(int, match.groups()))


@cache
def device_command(release: str) -> tuple[list[str], dict[str, str]]:
    """Return the command of the device in this release, and what its environment must have.
    Fetches what is missing. Raises UnavailableError."""
    version = qemu_version()
    CACHE.mkdir(exist_ok=True)
    with FileLock(CACHE / f"{release}.lock"):
        root, site = _userland(release), _site(release, version)
    python = root / "usr" / "bin" / f"python{PYTHONS[release]}"
    command = [QEMU, "-cpu", "cortex-a72", "-L", str(root), str(python)]
    # its own standard library: that of this machine may be found at the same path
    environment = {"PYTHONHOME": str(root / "usr"), "PYTHONPATH": str(site)}
    return [*command, "-m", "fleetlearn_device"], environment


def _userland(release: str) -> Path:
    """Return the folder of a release, with Python in it."""
    folder = CACHE / release
    if (folder / "root").is_dir():
        return folder / "root"
    if shutil.which("apt-get") is None or not KEYRING.exists():
        raise UnavailableError("apt-get and the keys of Debian's archive are not here")
    for name in ("state/lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "state" / "status").touch()
    sources = f"deb [arch=arm64 signed-by={KEYRING}] {_mirror()} {release} main\n"
    (folder / "sources.list").write_text(sources)
    (folder / "apt.conf").write_text(APT.format(folder=folder))
    apt = ["apt-get", "-qq", "--yes", "-c", str(folder / "apt.conf")]
    for words in (["update"], ["install", "--download-only", *PACKAGES]):
        done = subprocess.run([*apt, *words], capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise UnavailableError(f"Debian's packages for arm64 cannot be had: {done.stderr}")
    draft = folder / "draft"
    shutil.rmtree(draft, ignore_errors=True)
    for package in sorted((folder / "cache" / "archives").glob("*.deb")):
        subprocess.run(["dpkg-deb", "--extract", str(package), str(draft)], check=True)
    _merge(draft)
    draft.rename(folder / "root")
    return folder / "root"


def _merge(root: Path) -> None:
    """Make /lib a link to /usr/lib, as in an installed system. A release of which some packages
    know that already, and others not, has files in both."""
    lib = root / "lib"
    if lib.is_dir() and not lib.is_symlink():
        shutil.copytree(lib, root / "usr" / "lib", symlinks=True, dirs_exist_ok=True)
        shutil.rmtree(lib)
    if not lib.exists():
        lib.symlink_to("usr/lib")


def _mirror() -> str:
    """Return the address of Debian's archive that this machine uses."""
    words = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"]
    lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    found = [line for line in lines if line.rstrip("/").endswith("/debian")]
    if not found:
        raise UnavailableError("apt knows no mirror of Debian here")
    return found[0]


def _site(release: str, qemu: tuple[int, ...]) -> Path:
    """Return a folder with the device and what it needs, from wheels."""
    python, old = PYTHONS[release], qemu < (10,)
    site = CACHE / f"site-{release}-{'old' if old else 'new'}-qemu"
    if not site.is_dir():
        draft = site.with_suffix(".draft")
        shutil.rmtree(draft, ignore_errors=True)
        built = _wheel()
        options = ["--quiet", "--target", str(draft), "--only-binary", ":all:"]
        options += ["--python-version", python, "--implementation", "cp"]
        for platform in ("manylinux_2_28", "manylinux_2_27", "manylinux2014"):
            options += ["--platform", f"{platform}_aarch64"]
        wanted = [str(built), *([OLD_QEMU] if old else [])]
        words = [sys.executable, "-m", "pip", "install", *options, *wanted]
        done = subprocess.run(words, capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise UnavailableError(f"wheels for aarch64 cannot be had: {done.stderr[-500:]}")
        draft.rename(site)
    _refresh(site)
    return site


def _wheel() -> Path:
    """Build the wheel of the device alone."""
    folder = CACHE / "wheel"
    shutil.rmtree(folder, ignore_errors=True)
    words = ["-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder)]
    subprocess.run(
        [sys.executable, *words, str(ROOT / "device_sdk")], check=True, capture_output=True
    )
    (built,) = folder.glob("*.whl")
    return built


def _refresh(site: Path) -> None:
    """Put today's device into a folder that an earlier run has made."""
    for package in ("fleetlearn_device", "fleetlearn_protocol"):
        shutil.rmtree(site / package, ignore_errors=True)
    words = ["unzip", "-q", "-o", str(_wheel()), "-d", str(site)]
    subprocess.run(words, check=True)
