"""The machine under the device: Python, ONNX Runtime, the state directory, disk, memory, clock."""

from __future__ import annotations

import os
import platform
import shutil
import stat
import sys
import time
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from importlib.util import find_spec
from pathlib import Path

from fleetlearn_protocol.command_line import installed_version
from fleetlearn_protocol.errors import in_words

from fleetlearn_device.doctor.finding import Finding, Findings
from fleetlearn_device.runtimes.import_onnxruntime import (
    RuntimeUnavailableError,
    import_onnxruntime,
    import_training_api,
)
from fleetlearn_device.runtimes.providers import ProviderName, open_provider
from fleetlearn_device.storage.credential import FILE as CREDENTIAL
from fleetlearn_device.storage.credential import read_credential, was_let_in
from fleetlearn_device.storage.device_key import FILE as DEVICE_KEY
from fleetlearn_device.storage.device_key import read_device_key
from fleetlearn_device.storage.errors import StateError
from fleetlearn_device.storage.identity import read_name
from fleetlearn_device.storage.state_directory import is_running

LOW_DISK, NO_DISK = 2**30, 100 * 2**20
"""Bytes free: fewer are a warning, and too few."""
LOW_MEMORY, NO_MEMORY = 200 * 2**20, 64 * 2**20
"""The same of memory: a device idles in 60 MB."""
PROBE = 4 * 2**20
"""Bytes that are written to see how fast the disk is."""
SLOW = 2.0
"""Seconds for these."""
SOURCE_DATE = datetime(2026, 1, 1, tzinfo=timezone.utc)
"""A clock before this software was written is wrong."""
CLOCK_WARNING, CLOCK_BAD = 60.0, 86400.0
"""Seconds that a clock may differ from the coordinator's: beyond the first, logs are hard to
compare; beyond the second, certificates may seem to be of another time."""


def check_software(runtime: str, provider: ProviderName, trusts: bool) -> Findings:
    """Check Python, ONNX Runtime and the package for signatures. ``trusts``: the device has keys to
    trust."""
    version = f"{platform.python_version()}, {sys.platform} {platform.machine()}"
    if sys.maxsize < 2**32:
        do = "install a 64-bit system: ONNX Runtime has no wheels for 32-bit ARM"
        yield Finding("python", "bad", f"{version}, 32 bit", do)
    else:
        yield Finding("python", "good", f"{version}; fleetlearn {installed_version()}")
    try:
        module = import_onnxruntime()
        if runtime == "ort-training":
            import_training_api()
        open_provider(provider)
        yield Finding("runtime", "good", f"ONNX Runtime {module.__version__} on {provider}")
    except RuntimeUnavailableError as error:
        do = 'pip install "fleetlearn[device]", in an environment with one ONNX Runtime alone'
        yield Finding("runtime", "bad", str(error), do)
    if trusts and find_spec("cryptography") is None:
        do = 'pip install "fleetlearn[device,signatures]"'
        yield Finding("signatures", "bad", "keys to trust are set, and none can be checked", do)


def check_state(folder: Path, *, token: bool) -> Findings:
    """Check the state directory and the credential in it. ``token``: the device is given one."""
    folder = folder.absolute()
    writable = _can_write(folder)
    yield writable
    try:
        identity = folder / "identity.json"
        name = read_name(identity) if identity.exists() else None
        running = is_running(folder)
        credential, key = read_credential(folder), read_device_key(folder)
    except StateError as error:
        yield Finding(
            "state", "bad", str(error), "do what it says; a new directory is a new device"
        )
        return
    except OSError as error:
        if writable.state == "bad":  # that says it
            return
        do = f"let this user read and write it: sudo chown -R $(id -un) {folder}"
        yield Finding("state", "bad", f"{folder}: {in_words(error)}", do)
        return
    if name is not None:
        runs = "a device runs with it" if running else "no device runs with it now"
        yield Finding("device", "good", f"{name}; {runs}")
    if key is not None and _is_open_to_others(folder / DEVICE_KEY):
        found = f"{folder / DEVICE_KEY}: others on this machine may read the device's own key"
        do = (
            f"stop the device, delete {folder / DEVICE_KEY}, and give the line that "
            "`fleetlearn-device public-key` prints to the helper's operator, who revokes the old"
            " key"
        )
        yield Finding("device key", "bad", found, do)
    if credential is not None:
        path = folder / CREDENTIAL
        if _is_open_to_others(path):
            do = f"chmod 600 {path}, then `fleetlearn-device rotate`"
            yield Finding("credential", "bad", f"{path}: others on this machine may read it", do)
        elif was_let_in(folder):
            yield Finding("credential", "good", "the device has one, and was let in with it")
        else:
            yield Finding("credential", "good", "the device has one, and was never let in yet")
    elif was_let_in(folder):
        yield Finding("credential", "good", "none, and a coordinator let the device in without one")
    elif token:
        yield Finding("credential", "good", "none yet; the token enrols the device at its start")
    else:
        found = "none, and no token: only a coordinator that asks for none lets the device in"
        do = "if it asks, get a token: `fleetlearn-coordinator enrol`, then --token"
        yield Finding("credential", "unknown", found, do)


def _can_write(folder: Path) -> Finding:
    place = existing(folder)
    if not os.access(place, os.R_OK | os.W_OK | os.X_OK):
        make = f"sudo install -d -o $(id -un) {folder}"  # never: give a folder above away
        do = make if place != folder else f"be its owner: sudo -u '#{place.stat().st_uid}' COMMAND"
        found = f"{place}: this user may not write there"
        return Finding("state", "bad", found, f"{do}; or set another --state")
    if place != folder:
        return Finding("state", "good", f"{folder} is not there yet, and can be made")
    return Finding("state", "good", f"{folder}: this user may read and write there")


def existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above that is there."""
    folder = folder.absolute()
    # Path.exists raises an error below a folder that this user may not enter.
    while not os.path.exists(folder) and folder != folder.parent:  # noqa: PTH110
        folder = folder.parent
    return folder


def check_disk(folder: Path) -> Findings:
    """Check the room on the disk of the state directory, and how fast it takes what is synced."""
    place = existing(folder)
    free = shutil.disk_usage(place).free
    found = f"{free / 2**30:.2f} GiB free at {place}"
    if free < NO_DISK:
        do = "free some space: bundles, models and updates must fit"
        yield Finding("disk", "bad", found, do)
        return
    if free < LOW_DISK:
        yield Finding("disk", "warning", found, "free some space before it is full")
    else:
        yield Finding("disk", "good", found)
    try:
        seconds = _write_probe(place)
    except PermissionError:  # check_state has said so
        return
    except OSError as error:
        do = "look at the system's log: the card may be worn out, or mounted read-only"
        yield Finding("disk speed", "bad", f"{place}: {in_words(error)}", do)
        return
    found = f"{PROBE / 2**20:.0f} MiB were written and synced in {seconds:.2f} s"
    if seconds > SLOW:
        do = "use a faster card or disk: a worn card writes slowly before it fails"
        yield Finding("disk speed", "warning", found, do)
    else:
        yield Finding("disk speed", "good", found)


def _is_open_to_others(path: Path) -> bool:
    """Return whether other users of this machine may read or write a file."""
    return os.name == "posix" and bool(path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO))


def _write_probe(folder: Path) -> float:
    """Return the seconds that it takes to write PROBE bytes and sync them."""
    path = folder / f".fleetlearn-probe-{os.getpid()}"
    block = os.urandom(2**20)
    begin = time.perf_counter()
    try:
        with path.open("wb") as file:
            for _ in range(PROBE // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        return time.perf_counter() - begin
    finally:
        path.unlink(missing_ok=True)


def check_memory(meminfo: Path = Path("/proc/meminfo")) -> Finding:
    """Check the memory that a program may still take, as Linux says."""
    try:
        rows = dict(line.split(":", 1) for line in meminfo.read_text("ascii").splitlines())
        free, total = (int(rows[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))
    except (OSError, KeyError, ValueError):
        return Finding("memory", "unknown", "this system does not say how much is free")
    found = f"{free / 2**20:.0f} MiB of {total / 2**20:.0f} MiB can be used"
    if free < NO_MEMORY:
        return Finding("memory", "bad", found, "end other programs: a device needs 60 MB at rest")
    if free < LOW_MEMORY:
        return Finding("memory", "warning", found, "it may be too little for a training step")
    return Finding("memory", "good", found)


def check_clock(theirs: str | None, now: float) -> Finding:
    """Check the clock. ``theirs``: the header Date of the coordinator's answer; None: there was no
    answer. ``now``: Unix time."""
    here = datetime.fromtimestamp(now, timezone.utc)
    shown = here.isoformat(" ", "seconds")
    do = "sudo timedatectl set-ntp true; a board without a battery has no time before it has NTP"
    if here < SOURCE_DATE:
        return Finding("clock", "bad", f"{shown} is before this software was written", do)
    try:
        off = now - parsedate_to_datetime(theirs or "").timestamp()
    except (TypeError, ValueError):
        return Finding("clock", "unknown", f"{shown}; there was no other clock to compare it with")
    if abs(off) <= CLOCK_WARNING:
        return Finding("clock", "good", f"{shown}, as the coordinator's")
    found = f"{shown}, {abs(off):.0f} s {'ahead of' if off > 0 else 'behind'} the coordinator's"
    return Finding("clock", "bad" if abs(off) > CLOCK_BAD else "warning", found, do)
