"""What a coordinator needs, checked before it is served or while it is: what is so, and what to do.

No check changes anything, but for a port that is listened on for a moment where no coordinator
runs.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import resource
import shutil
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, suppress
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.addresses import is_loopback
from fleetlearn_protocol.date_text import date_text
from fleetlearn_protocol.epsilon_text import budget_text, spent_text
from fleetlearn_protocol.errors import FleetError, in_words, many
from fleetlearn_protocol.extensions import ExtensionError
from fleetlearn_protocol.manifest import Manifest

from fleetlearn_coordinator.network import process_settings
from fleetlearn_coordinator.plan.distil_files import check_distillation
from fleetlearn_coordinator.plan.initial_model import initial_model
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.plan.privacy_terms import epsilon_after, noise_multiplier
from fleetlearn_coordinator.plan.service_settings import ServiceSettings, Tls
from fleetlearn_coordinator.plan.without_effect import without_effect
from fleetlearn_coordinator.privacy.accounting import has_accounting
from fleetlearn_coordinator.service.training_run.own_origins import own_origins
from fleetlearn_coordinator.service.views.records import CheckView, RunView
from fleetlearn_coordinator.service.views.run_views import RunPlace, run_view
from fleetlearn_coordinator.storage.errors import StoreError, StoreUnavailableError
from fleetlearn_coordinator.storage.find_storage import find_storage, storage_for
from fleetlearn_coordinator.storage.identities import DATABASE, Identities
from fleetlearn_coordinator.storage.ledger import PRIVACY_COPIED
from fleetlearn_coordinator.storage.run_storage import RunStorage
from fleetlearn_coordinator.storage.store import most_spool_files
from fleetlearn_coordinator.storage.stored_elsewhere import StoredElsewhere

GOOD, WARNING, BAD, UNKNOWN = "good", "warning", "bad", "unknown"
FREE = 2**30
"""Bytes that should stay free on the disk, whatever the model."""
AHEAD = 60.0
"""Seconds that what was recorded may be ahead of the clock."""
TIME_ERROR = 5
"""What Linux answers of a clock that nothing sets (adjtimex(2))."""
Checks = Iterator[CheckView]


def check_software() -> Checks:
    """Check the versions of Python and of the libraries that the coordinator's extra asks for."""
    yield CheckView("python", GOOD, f"{platform.python_version()}, {sys.platform}")
    wanted = [text for text in requires("fleetlearn") or () if _is_needed(text)]
    found, missing = [], []
    for text in wanted:
        name, least = re.split("[<>=!~; ]", text)[0], re.search(r">=([0-9.]+)", text)
        try:
            own = version(name)
        except PackageNotFoundError:
            missing.append(f"{name} is not installed")
            continue
        found.append(f"{name} {own}")
        if least is not None and _numbers(own) < _numbers(least[1]):
            missing.append(f"{name} {own} is older than {least[1]}")
    if missing:
        do = 'pip install --upgrade "fleetlearn[coordinator]"'
        yield CheckView("libraries", BAD, "; ".join(missing), do)
    else:
        yield CheckView(
            "libraries", GOOD, f"fleetlearn {version('fleetlearn')}, {', '.join(found)}"
        )


def _is_needed(requirement: str) -> bool:
    """Return whether the coordinator needs it: without an extra, or with its own."""
    extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", requirement)
    return extra is None or extra[1] == "coordinator"


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall("[0-9]+", text)[:3])


def check_plan(plan: Plan, service: ServiceSettings, run: str = "") -> Checks:
    """Check a plan against its bundle and the service, and its stores. ``run``: the run's name, if
    it is one of several."""
    try:
        plan.check_served(service)
        yield CheckView("plan", GOOD, f"{plan.file}: {plan.name}, recipe {plan.recipe}")
    except FleetError as error:
        yield CheckView("plan", BAD, error.text, "change the plan or the service file")
    for remark in without_effect(plan):
        yield CheckView("keys", WARNING, remark, "change the plan, unless this is meant")
    if plan.privacy is not None:
        yield check_privacy(plan)
    elements = words = update = 0
    manifests: dict[str, Manifest] = {}
    try:
        manifests = {name: open_bundle(path).manifest for name, path in plan.members.items()}
        for manifest in manifests.values():
            plan.check_bundle(manifest)
            plan.hyper(manifest)
        plan.check_family(manifests)
        elements = sum(manifest.size for manifest in manifests.values())
        update = max(plan.update_bytes(manifest) for manifest in manifests.values())
        if plan.secure is not None:
            words = sum(map(plan.masked_words, manifests.values()))  # of one bundle
        for name, path in plan.members.items():
            about = f"{path}: {manifests[name].size} parameters, whole"
            yield CheckView("bundle", GOOD, f"{name}: {about}" if name else about)
        yield from check_distil(plan, manifests)
    except FleetError as error:
        do = "export the model again, or change the plan"
        yield CheckView("bundle", BAD, error.text, do)
    with suppress(ExtensionError):  # what cannot be had is said of the plan, or of the bundle
        for key, origin in own_origins(plan, manifests.values()).items():
            yield CheckView("own algorithm", GOOD, f"{key} = {origin}")
    if plan.secure is not None:
        # It brings asyncio, cryptography and http.client: others need not wait for them.
        from fleetlearn_coordinator.service.helper_check import check_helper

        if helper := check_helper(plan, words):
            yield helper
    try:
        wanted = StoredElsewhere(run or plan.name, service.ledger, service.blobs)
        storage = storage_for(plan.data_dir, wanted)
    except StoreUnavailableError as error:
        yield CheckView("ledger", BAD, error.text, "mend what it names")
        return
    except FleetError as error:
        yield CheckView("data", BAD, error.text, "change data_dir in the plan")
        return
    yield from check_initial(plan, storage)
    if storage.has_folder:
        yield from check_folder("data", plan.data_dir, private=plan.privacy is not None)
        yield check_disk(plan, service, 4 * elements, update)
    else:
        yield CheckView("data", GOOD, f"{storage.where} is a store, and no folder here")
    try:
        if found := storage.check_ledger():
            yield CheckView("ledger", GOOD, found)
    except FleetError as error:
        yield CheckView("ledger", BAD, error.text, "mend what it names")


def check_initial(plan: Plan, storage: RunStorage) -> Checks:
    """Check the file that a new run begins with. A run that has begun has its models, and reads the
    file no more."""
    if plan.initial is None:
        return
    try:
        bundle = open_bundle(plan.bundle)
    except FleetError:
        return  # its own check says so
    try:
        initial_model(plan, bundle)
    except FleetError as error:
        if _has_begun(storage):
            found = f"{error.text}. The run has begun, and does not need the file any more"
            yield CheckView("initial", GOOD, found)
        else:
            yield CheckView("initial", BAD, error.text, "mend the file, or the plan's initial")
        return
    yield CheckView("initial", GOOD, f"{plan.initial}: the model that a new run begins with")


def _has_begun(storage: RunStorage) -> bool:
    try:
        with storage.read_ledger() as ledger:
            return bool(ledger.models())
    except FleetError:  # there is none yet; where it cannot be read, its own check says so
        return False


def check_distil(plan: Plan, manifests: Mapping[str, Manifest]) -> Checks:
    """Check that the files of [distil] fit the plan's bundles, and that its process could run."""
    if plan.distil is None:
        return
    # It brings asyncio: others need not wait for it.
    from fleetlearn_coordinator.service import worker_process

    try:
        check_distillation(plan, manifests)
        worker_process.check_installed("distillation", "leave [distil] out")
        yield CheckView("distil", GOOD, f"{plan.distil.data} fits its bundles")
    except FleetError as error:
        do = "change [distil] in the plan, or make its files again"
        yield CheckView("distil", BAD, error.text, do)


def check_privacy(plan: Plan) -> CheckView:
    """Check that the budget of a private plan allows a release, and that it can be computed."""
    try:
        plan.check_privacy()
    except FleetError as error:
        do = f"change [privacy] in the plan: `fleetlearn-coordinator privacy {plan.file}`"
        if not has_accounting():
            do = 'pip install "fleetlearn[coordinator,privacy]"'
        return CheckView("privacy", BAD, error.text, do)
    noise, rounds = noise_multiplier(plan), plan.stop.rounds
    assert plan.privacy is not None
    spent = spent_text(epsilon_after(plan, rounds, noise), plan.privacy.epsilon, 4)
    found = (
        f"epsilon {spent} at delta {plan.privacy.delta:g} after "
        f"{rounds} releases; noise multiplier {noise:.4g}"
    )
    if plan.privacy.epsilon is not None:
        found += f"; budget {budget_text(plan.privacy.epsilon)}"
    return CheckView("privacy", GOOD, found)


def check_folder(what: str, folder: Path, *, private: bool = False) -> Checks:
    """Check that this user may write in a folder, or make it. ``private``: whether nobody else is
    to read it."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    if not os.access(place, os.R_OK | os.W_OK | os.X_OK):
        do = f"chown it to the coordinator's user: chown -R $(id -un) {place}"
        yield CheckView(what, BAD, f"{place}: this user may not write there", do)
    elif place != folder:
        yield CheckView(what, GOOD, f"{folder} is not there yet, and can be made")
    elif folder.stat().st_mode & 0o002:
        do = f"chmod o-w {folder}"
        yield CheckView(what, BAD, f"{folder}: everybody on this machine may write there", do)
    elif private and folder.stat().st_mode & 0o005:
        found = (
            f"{folder}: everybody on this machine may read there: devices' updates, and what the "
            "noise of [privacy] follows from"
        )
        yield CheckView(what, WARNING, found, f"chmod o-rx {folder}")
    else:
        yield CheckView(what, GOOD, f"{folder}: this user may read and write there")


def check_disk(plan: Plan, service: ServiceSettings, size: int, update: int) -> CheckView:
    """Check that the disk has room for the models that are kept and a round's updates. ``size``:
    bytes of the model. ``update``: of a device's update."""
    place = plan.data_dir
    while not place.exists() and place != place.parent:
        place = place.parent
    free = shutil.disk_usage(place).free
    models = 2 * size * (plan.models.last + 2 + (plan.models.best or 0))  # with optimizers' state
    updates = update * most_spool_files(service.uploads, _updates_kept(plan))
    needed = models + updates
    found = f"{_gib(free)} free; the models and a round's updates take up to {_gib(needed)}"
    if free < needed:
        return CheckView("disk", BAD, found, "free some space, or keep fewer models ([models])")
    if free < needed + FREE:
        return CheckView("disk", WARNING, found, "free some space before it is full")
    return CheckView("disk", GOOD, found)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def _updates_kept(plan: Plan) -> int:
    """Return how many updates of a round are kept; 0 where the plan's aggregator cannot be had."""
    try:
        return plan.updates_kept
    except FleetError:  # the check of the plan says so
        return 0


def check_run(place: RunPlace, plan: Plan | None = None) -> CheckView:
    """Check whether a coordinator serves the run, how the last one ended, and whether ``plan``
    keeps what the run has promised of privacy."""
    what = f"run {place.name}"
    try:
        run = run_view(place, last=1)
    except StoreError as error:
        if error.code == "unknown-content":
            return CheckView(what, GOOD, "has not begun; `fleetlearn-coordinator serve` begins it")
        return CheckView(what, BAD, error.text, "mend what it names")
    except StoreUnavailableError as error:
        return CheckView(what, BAD, error.text, "mend what it names")
    if plan is not None and (broken := _broken_promise(plan, run)):
        do = "put [privacy] back, or take it out, or begin another run (another name and data_dir)"
        return CheckView(what, BAD, broken, do)
    if run.privacy is not None and (copied := _copied(place)):
        found = f"{copied}; what its original has released since is not counted"
        do = f"fleetlearn-coordinator count-releases {place.data} NUMBER"
        return CheckView(what, BAD, found, do)
    if run.state == "failed":
        return CheckView(what, BAD, run.failed, "mend that, then `fleetlearn-coordinator resume`")
    if run.finished is not None:
        return CheckView(what, GOOD, f"finished: {run.finished}; model version {run.version}")
    if run.running:
        waits = f"; {run.waits_for}" if run.waits_for else ""
        return CheckView(what, GOOD, f"a coordinator runs at {run.address}{waits}")
    if run.state == "died":
        do = "`fleetlearn-coordinator serve` goes on with it; its log says why it ended"
        return CheckView(what, WARNING, "its coordinator was killed, or the machine went down", do)
    return CheckView(what, GOOD, f"is stopped at model version {run.version}")


def _broken_promise(plan: Plan, run: RunView) -> str:
    """Return why ``serve`` refuses [privacy], or the lack of it, in a run's plan; empty if it does
    not."""
    releases = 0 if run.privacy is None else run.privacy.releases
    if plan.privacy is None and releases:
        made = many(releases, "release")
        return f"has made {made} under [privacy], which the plan does not have any more"
    if plan.privacy is not None and run.privacy is None and run.version:
        return f"has released models without [privacy], up to version {run.version}"
    return ""


def _copied(place: RunPlace) -> str:
    """Return what became of a private run's data directory that ``serve`` refuses; empty:
    nothing."""
    # Beside NumPy: for private runs alone.
    from fleetlearn_coordinator.service.training_run.private_budget import PLACE, uncounted_copy

    storage = find_storage(place.data)
    with storage.read_ledger() as ledger:
        known = ledger.metadata()
    return uncounted_copy(storage.where, known.get(PRIVACY_COPIED), known.get(PLACE))


def check_ports(service: ServiceSettings, *, running: bool) -> Checks:
    """Check that the ports of a service are free. ``running``: a coordinator listens there."""
    ports = [("port", service.host, service.port)]
    if service.admin is not None:
        ports.append(("admin port", service.admin.host, service.admin.port))
    if service.page is not None:
        ports.append(("page port", service.page.host or service.host, service.page.port))
    if service.metrics is not None:
        ports.append(("metrics port", service.metrics.host, service.metrics.port))
    for what, host, port in ports:
        where = f"{host}:{port}"
        if port == 0:
            yield CheckView(what, GOOD, f"any that is free on {host}")
        elif running:
            yield CheckView(what, GOOD, f"{where}, where the coordinator listens")
        elif why := _why_not(host, port):
            do = "end the other program, or set another port in the service file"
            yield CheckView(what, BAD, f"{where}: {why}", do)
        else:
            yield CheckView(what, GOOD, f"{where} is free")


def _why_not(host: str, port: int) -> str:
    """Return why an address cannot be listened on; empty if it can."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in found[:1]:
            with socket.socket(family, kind, protocol) as one:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                one.bind(address)
                one.listen(1)
    except OSError as error:
        return in_words(error)
    return ""


def check_tls(service: ServiceSettings, now: float) -> Checks:
    """Check the certificate: its files, its days and its names. ``now``: Unix time."""
    tls = service.tls
    if tls is None:
        if is_loopback(service.host):
            yield CheckView("tls", GOOD, f"none; {service.host} is for this machine alone")
        else:
            do = "fleetlearn-coordinator certificate NAME..., unless a proxy in front has TLS"
            yield CheckView("tls", WARNING, "none, and other machines may connect", do)
        return
    from fleetlearn_coordinator.network.tls import Certificates

    try:
        Certificates(tls)
    except FleetError as error:
        do = "fleetlearn-coordinator certificate NAME..."
        yield CheckView("tls", BAD, error.text, do)
        return
    yield from _check_certificate(tls, service.host, now)
    if tls.key.stat().st_mode & 0o004:
        do = f"chmod o-r {tls.key}"
        yield CheckView("tls key", BAD, f"{tls.key}: everybody on this machine may read it", do)


def _check_certificate(tls: Tls, host: str, now: float) -> Checks:
    # its import takes 45 ms, for few services
    from fleetlearn_coordinator.network.own_certificate import (
        DAY,
        read_certificates,
        remarks,
        remarks_on_ca,
    )

    own = read_certificates(tls.certificate)
    found = remarks(own[0], host, now) if own else []
    authorities = [] if tls.clients is None else read_certificates(tls.clients)
    found += [text for authority in authorities for text in remarks_on_ca(authority, now)]
    expired = bool(own) and bool(own[0].out_of_date(now))
    for text in found:
        state = BAD if expired else WARNING
        yield CheckView("tls", state, text, "fleetlearn-coordinator certificate NAME...")
    if own and not found:
        left = int((own[0].ends - now) // DAY)
        yield CheckView("tls", GOOD, f"{left} days left; for {own[0].listed}")


def check_identities(service: ServiceSettings) -> Checks:
    """Check the folder of identities and its audit log."""
    if service.identities is None:
        open_ = "whoever connects is a device"
        yield CheckView("identities", GOOD, f"the service file names none: {open_}")
        return
    yield from check_folder("identities", service.identities)
    if not (service.identities / DATABASE).is_file():
        return
    try:
        with closing(Identities(service.identities)) as identities:
            broken, devices = identities.broken_at(), len(identities.enrolled())
    except FleetError as error:
        yield CheckView("audit log", BAD, error.text, "put the database back from a backup")
        return
    if broken is not None:
        do = "find out who could write there; put the database back from a backup"
        yield CheckView("audit log", BAD, f"row {broken} was changed, or one before removed", do)
    else:
        yield CheckView("audit log", GOOD, f"no row was changed; {devices} devices are enrolled")


def check_gateways(service: ServiceSettings) -> Checks:
    """Check that there are cores for a service's gateways."""
    if not service.gateways:
        return
    found = f"{many(service.gateways, 'gateway')} beside the engine process"
    cores = os.cpu_count() or 1
    text = f"{found}; this machine has {many(cores, 'core')}"
    if service.gateways >= cores > 1:
        do = f"gateways = {cores - 1} leaves a core to the engine process"
        yield CheckView("gateways", WARNING, text, do)
    else:
        yield CheckView("gateways", GOOD, text)


def check_bus(service: ServiceSettings, plans: Iterable[str]) -> Checks:
    """Check that the bus can be reached, and that this process may hear what it must: as a gateway,
    or as the engine process of each of these plans."""
    if service.bus is None:
        return
    # It brings asyncio: others need not wait for it.
    import asyncio

    from fleetlearn_coordinator.gateways.nats_place import place_of, try_place

    gateway = None if service.gateway is None else service.gateway.own_name
    for run in plans if service.gateway is None else (service.gateway.run,):
        place = place_of(service, run)
        assert place is not None
        try:
            yield CheckView("bus", GOOD, asyncio.run(try_place(place, gateway)))
        except FleetError as error:
            do = "mend the server's configuration, bus or [nats]: docs/operate/nats.md"
            yield CheckView("bus", BAD, error.text, do)


def check_files(service: ServiceSettings, plan: Plan | None) -> CheckView:
    """Check that the process may open as many files as the devices need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = hard  # the coordinator raises its own
    if limit == resource.RLIM_INFINITY:
        return CheckView("open files", GOOD, "no limit")
    kept = 0 if plan is None else _updates_kept(plan)
    files = most_spool_files(service.uploads, kept)
    shares = process_settings.places(service.max_connections, files=files)
    spare = max(0, limit - soft)
    devices = min(service.max_connections, max(0, shares.devices + spare))
    found = f"{limit} may be open, enough for {devices} devices at a time"
    do = "raise the limit: ulimit -n, or LimitNOFILE= of systemd; or lower max_connections"
    if plan is not None and devices < plan.round.cohort:
        return CheckView("open files", BAD, f"{found}; a round needs {plan.round.cohort}", do)
    # who asked for no number of devices need not be alarmed by ours
    default = service.max_connections == ServiceSettings().max_connections
    if devices < (process_settings.ENOUGH if default else service.max_connections):
        text = f"{found}; max_connections = {service.max_connections}"
        return CheckView("open files", WARNING, text, do)
    return CheckView("open files", GOOD, found)


def check_clock(places: list[RunPlace], now: float) -> CheckView:
    """Check that the clock is set, and is not behind what was recorded. ``now``: Unix time."""
    do = "set it: timedatectl set-ntp true, or your system's time service"
    for place in places:
        with suppress(FleetError):
            seen = run_view(place, last=1).seen
            if seen is not None and seen > now + AHEAD:
                text = f"{seen - now:.0f} s behind what {place.name}'s coordinator has recorded"
                return CheckView("clock", BAD, text, do)
    shown = date_text(now)
    match is_clock_set():
        case True:
            return CheckView("clock", GOOD, f"{shown}, kept by the system")
        case False:
            return CheckView(
                "clock", WARNING, f"{shown}; the system says that nothing keeps it right", do
            )
    return CheckView("clock", UNKNOWN, f"{shown}; this system does not say what keeps it right")


def is_clock_set() -> bool | None:
    """Return whether the system says that its clock is kept right; None: it does not say."""
    try:
        adjtimex = ctypes.CDLL(None).adjtimex
    except (OSError, AttributeError):
        return None
    found: int = adjtimex(ctypes.create_string_buffer(512))  # modes 0: reads alone
    return None if found < 0 else found != TIME_ERROR
