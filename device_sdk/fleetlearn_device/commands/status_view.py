"""What ``fleetlearn-device status`` says: the records of ``--json``, and lines for people.

python -m fleetlearn_device.commands.status_view docs/start/device-status.schema.json
"""

from __future__ import annotations

import json
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import msgspec
from fleetlearn_protocol.epsilon_text import budget_text, spent_text

from fleetlearn_device.session.history import History
from fleetlearn_device.storage.state_directory import Summary
from fleetlearn_device.storage.status import DeviceStatus

DeviceDoes = Literal["stopped", "offline", "paused", "ineligible", "waiting", "working"]
"""What a device does, in a word for programs."""


class HeldUpdate(msgspec.Struct, frozen=True):
    """An update that waits for its acknowledgement."""

    task: str
    round: int
    bytes: int
    unmasked: bool = False
    """It is on this disk alone, and masked when the coordinator has said what it counts."""


class CachedBundle(msgspec.Struct, frozen=True):
    """A bundle that the device has on its disk."""

    sha256: str
    name: str


class OwnState(msgspec.Struct, frozen=True):
    """What never leaves the device: kept state, a personal model, or the tied vectors of a task."""

    bundle: str
    """SHA-256 of the bundle that it belongs to, or the beginning."""
    bytes: int
    about: str
    """Which of these it is, for people."""


class PrivacyView(msgspec.Struct, frozen=True):
    """The differential privacy of the last task's run, as the coordinator says; and how often the
    device took part."""

    spent: float
    """Epsilon of all that the run had released when the task was given, at most."""
    epsilon: float | None
    """The run's budget. None: it has none."""
    delta: float
    """The delta for which both epsilons hold."""
    took_part: int
    """How many updates the device made in this run."""
    may_take_part: int | None
    """How many its owner allows in one run. None: any number."""


class SecureView(msgspec.Struct, frozen=True):
    """How the update of the last task is hidden from the coordinator."""

    mode: str
    """``helper``, or ``pairwise``."""
    minimum: int
    """The fewest devices whose updates the coordinator learns the sum of."""
    helper: str | None
    """The public key of the helper, which no device must trust with both."""


class StatusView(msgspec.Struct, frozen=True, kw_only=True):
    """How a device is. Times are Unix times in seconds."""

    device: str | None
    """Its name. None: it has none yet."""
    does: DeviceDoes
    why: str
    """Why nothing happens, or what does, in a sentence."""
    running: bool
    started: float | None
    """When the last process began. None: none did."""
    seen: float | None
    """When the process last had something to say."""
    ended: str
    """Why the last process ended. Empty: one runs, or was killed."""
    coordinator: str
    connected: bool
    connection: str
    """Whether there is a connection, and why not: a sentence without its subject."""
    connection_since: float | None
    connects_again: float | None
    round: int | None
    """The last round that the device trained in."""
    task: str
    """The last task. Empty: there was none."""
    kind: str
    """What the task was: ``round 3``, or a kind of exchange, such as ``evaluation``."""
    task_is: str
    """What the device does with the task, or how it ended: a sentence without its subject."""
    task_over: bool
    """The device has done with the task."""
    task_since: float | None
    checkpoint: bool
    """There is a checkpoint of the last training: the next start goes on from it, if the task is
    still wanted."""
    reason: str
    """Why the last task that failed, or did not count, did so. Empty: there was none."""
    reason_at: float | None
    error: str
    """The last error, of whatever kind. Empty: there was none."""
    error_at: float | None
    accepted: int
    """Updates that the coordinator accepted."""
    answered: int
    uncounted: int
    failed: int
    bytes_sent: int
    bytes_received: int
    bytes_written: int
    """To files of the state directory."""
    paused_by: str
    """What keeps the device from training, in a word. Empty: nothing does."""
    privacy: PrivacyView | None
    """None: the coordinator said nothing of privacy with the last task to train."""
    secure: SecureView | None
    """None: the update of the last task is not masked."""
    held: HeldUpdate | None
    bundles: list[CachedBundle]
    own: list[OwnState]
    trusts: list[str]


_NOTHING_KNOWN = DeviceStatus(0.0, "", 0.0, None, False, "", 0.0, History(), 0.0)


def view_of(summary: Summary) -> StatusView:
    """Return the view of a state directory."""
    running, known = summary.running, summary.status is not None
    status = summary.status or _NOTHING_KNOWN
    history, held = status.history, summary.pending
    does, why = does_now(summary.status, running)
    return StatusView(
        device=summary.device,
        does=does,
        why=why,
        running=running,
        started=status.started if known else None,
        seen=status.written if known else None,
        ended=status.end,
        coordinator=status.coordinator,
        connected=running and status.is_connected,
        connection=status.connection,
        connection_since=status.connection_since if running and known else None,
        connects_again=status.again_at if running else None,
        round=history.round,
        task=history.task,
        kind=history.what,
        task_is=status.task,
        task_over=bool(history.end),
        task_since=status.task_since if history.task else None,
        checkpoint=summary.checkpoint,
        reason=history.reason,
        reason_at=status.reason_since if history.reason else None,
        error=status.error,
        error_at=status.error_at if status.error else None,
        accepted=history.accepted,
        answered=history.answered,
        uncounted=history.uncounted,
        failed=history.failed,
        bytes_sent=status.bytes_sent,
        bytes_received=status.bytes_received,
        bytes_written=status.bytes_written,
        paused_by=status.paused_by if running else "",
        privacy=_privacy(status),
        secure=_secure(status),
        held=None
        if held is None
        else HeldUpdate(held.task, held.round, held.size, summary.unmasked),
        bundles=[CachedBundle(sha256, name) for sha256, name in summary.bundles],
        own=_own(summary),
        trusts=[*summary.trusted],
    )


def _privacy(status: DeviceStatus) -> PrivacyView | None:
    note = status.history.privacy
    if note is None:
        return None
    return PrivacyView(note.spent, note.epsilon, note.delta, status.took_part, status.may_take_part)


def _secure(status: DeviceStatus) -> SecureView | None:
    secure = status.history.secure
    return None if secure is None else SecureView(secure.mode, secure.minimum, secure.helper)


def _own(summary: Summary) -> list[OwnState]:
    found = [OwnState(tied.bundle, tied.size, f"of task {tied.task}") for tied in summary.tied_sets]
    for name, size in summary.kept_states:
        bundle, _, kind = name.partition(".")
        found.append(OwnState(bundle, size, kind or "kept state"))
    return found


def does_now(status: DeviceStatus | None, running: bool) -> tuple[DeviceDoes, str]:
    """Return what a device does, in a word and in a sentence: of one that does nothing, why not."""
    if status is None:
        if running:
            return "offline", "it has just begun"
        return "stopped", "it does not run, and never ran with this state directory"
    if not running:
        why = status.end or "it was killed, or the power failed"
        return "stopped", f"it does not run: {why}"
    history = status.history
    if history.task and not history.end:
        return "working", f"working: task {history.task} ({history.what}) {status.task}"
    if status.paused:
        return "paused", f"paused: {status.paused}, since {when(status.paused_since)}"
    if not status.is_connected:
        return "offline", status.connection
    if status.ineligible:
        return "ineligible", f"not eligible: {status.ineligible}"
    if not status.ready:
        return "waiting", "waiting: the coordinator has not answered the check-in yet"
    if status.waits:
        said = f"so said the coordinator at {when(status.connection_since)}"
        return "waiting", f"waiting: {status.waits} ({said})"
    since = status.connection_since
    if history.task:
        since = max(since, status.task_since)
    text = f"waiting: the coordinator has not chosen it for a round since {when(since)}"
    return "waiting", text


def lines_of(view: StatusView, now: float) -> list[tuple[str, str]]:
    """Return a status for people: a word for what each line is about, and the line. ``now``: Unix
    time."""
    lines = [("device", view.device or "(not named yet)"), ("now", view.why)]
    if view.started is not None and view.seen is not None:
        if view.running:
            since = f"runs since {when(view.started)} ({_long(now - view.started)})"
        elif view.ended:
            since = f"ended at {when(view.seen)}: {view.ended}"
        else:
            since = (
                "does not run, and did not end in order: it was killed, or the power failed, after "
                f"{when(view.seen)}"
            )
        lines.append(("process", since))
    if view.running and view.connection_since is not None:
        again = view.connects_again
        text = f"{view.connection}, since {when(view.connection_since)}"
        if again is not None:
            text = f"{text}; it connects again at {when(again)}"
        lines.append(("link", text))
    if view.task and view.task_since is not None:
        what = f"{view.task} ({view.kind})" if view.kind else view.task
        text = f"{view.task_is}, since {when(view.task_since)}"
        if view.does == "stopped" and not view.task_over:
            text = f"when the process ended: {text}"
            if view.checkpoint and not view.ended:  # else the line says it already
                text = f"{text}; the next start goes on from its checkpoint"
        lines.append(("task", f"{what} {text}"))
    elif view.seen is not None:
        lines.append(("task", "none was given to this device yet"))
    counts = [(view.accepted, "accepted"), (view.answered, "questions answered")]
    counts += [(view.uncounted, "not counted"), (view.failed, "failed")]
    lines.append(("tasks", ", ".join(f"{number} {what}" for number, what in counts)))
    if view.privacy is not None:
        lines.append(("privacy", _privacy_line(view.privacy)))
    if view.secure is not None:
        lines.append(("secure", _secure_line(view.secure)))
    moved = f"{view.bytes_sent:,} sent, {view.bytes_received:,} received"
    lines.append(("bytes", f"{moved}, {view.bytes_written:,} written to the disk"))
    if view.reason and view.reason_at is not None:
        lines.append(("reason", f"{view.reason} ({when(view.reason_at)})"))
    if view.error and view.error != view.reason and view.error_at is not None:
        lines.append(("error", f"{view.error} ({when(view.error_at)})"))
    lines += [("trusts", key) for key in view.trusts]
    lines += [("bundle", f"{each.sha256[:12]}  {each.name}") for each in view.bundles]
    for own in view.own:
        text = f"{own.bundle[:12]}  {own.bytes} bytes that never leave the device ({own.about})"
        lines.append(("own", text))
    held = view.held
    if held is None:
        lines.append(("update", "none waits for its acknowledgement"))
    else:
        what = f"task {held.task} of round {held.round}, {held.bytes} bytes"
        waits = "waits for its acknowledgement"
        if held.unmasked:
            waits = "is on this disk alone, and masked when the coordinator says what it counts"
        lines.append(("update", f"{what}, {waits}"))
    return lines


def _privacy_line(privacy: PrivacyView) -> str:
    budget = "" if privacy.epsilon is None else f" of {budget_text(privacy.epsilon)}"
    spent = spent_text(privacy.spent, privacy.epsilon)
    # The number came with the task, so what this device made of it is not in it.
    said = f"epsilon {spent}{budget} (delta {privacy.delta:.3g}) before its newest task"
    count = "once" if privacy.took_part == 1 else f"{privacy.took_part} times"
    most = privacy.may_take_part
    allowed = "" if most is None else f"; its owner allows {most} in one run"
    return f"{said}, as the coordinator says; this device took part {count}{allowed}"


def _secure_line(secure: SecureView) -> str:
    said = f"the coordinator learns the sum of at least {secure.minimum} devices' updates"
    helper = "" if secure.helper is None else f", with the helper {secure.helper[:16]}..."
    return f"{said}{helper}"


def when(seconds: float) -> str:
    """Return a Unix time as people read it here, with its zone."""
    return datetime.fromtimestamp(seconds, timezone.utc).astimezone().isoformat(" ", "seconds")


def _long(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def schema_text() -> str:
    """Return the JSON schema of what ``status --json`` prints, as the file has it."""
    (found,), components = msgspec.json.schema_components(
        [StatusView], ref_template="#/$defs/{name}"
    )
    schema: dict[str, Any] = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "What fleetlearn-device status prints with --json",
        "description": "With --watch each line is one. A later version may add fields.",
        **found,
        "$defs": components,
    }
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(schema_text(), "utf-8")
