"""The class that a program uses to serve a coordinator with its own data."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetlearn_protocol.command_line import installed_version, refuse_in_loop, stop_signals
from fleetlearn_protocol.errors import BundleError
from fleetlearn_protocol.json_log import said
from fleetlearn_protocol.paths import in_home
from fleetlearn_protocol.secure.pairwise_messages import PAIRWISE
from fleetlearn_protocol.secure.roster import read_roster
from fleetlearn_protocol.systemd import READY, STOPPING, notify_systemd
from msgspec import UNSET
from numpy.typing import ArrayLike

from fleetlearn_device.agent import serve_programs
from fleetlearn_device.background import BackgroundRun
from fleetlearn_device.conditions.condition import SystemFiles
from fleetlearn_device.conditions.conditions import NO_CONDITIONS, Conditions, make_conditions
from fleetlearn_device.conditions.network import ask_owner, read_network
from fleetlearn_device.conditions.watch import ConditionWatch
from fleetlearn_device.driver.address import Enrolment, checked_address, read_token
from fleetlearn_device.driver.describing import Charging, Description, NetworkNow
from fleetlearn_device.driver.driver import Driver
from fleetlearn_device.driver.metrics_file import MetricsFile
from fleetlearn_device.driver.signatures import (
    find_verifier,
    has_cryptography,
    need_cryptography,
)
from fleetlearn_device.driver.timeouts import timeout
from fleetlearn_device.driver.timing import Timing
from fleetlearn_device.driver.watchdog import tell_alive
from fleetlearn_device.limits.cpu_share import limit_cpu
from fleetlearn_device.limits.device_limits import NO_LIMITS, DeviceLimits, check_limits
from fleetlearn_device.limits.memory import MemoryCeiling
from fleetlearn_device.own_code import Given as GivenFunctions
from fleetlearn_device.own_code import read_functions
from fleetlearn_device.predictor import BATCH, Predicted, Predictor, Which
from fleetlearn_device.runtimes.checks import Batch, DataError
from fleetlearn_device.runtimes.import_onnxruntime import import_onnxruntime, import_training_api
from fleetlearn_device.runtimes.open_runtime import check_choices
from fleetlearn_device.runtimes.providers import ProviderName, open_provider
from fleetlearn_device.runtimes.runtime import Kind
from fleetlearn_device.session.http_sources import http_sources
from fleetlearn_device.session.privacy_demands import NO_DEMANDS, PrivacyDemands, check_demands
from fleetlearn_device.session.secure_demands import (
    NO_SECURE_DEMANDS,
    SecureDemands,
    check_secure_demands,
    secure_refusal,
)
from fleetlearn_device.session.session import Session
from fleetlearn_device.session.states import Unmasked
from fleetlearn_device.session.trust import Trusted
from fleetlearn_device.storage.content_cache import cached_manifest
from fleetlearn_device.storage.model_in_use import ModelInUse, ModelsInUse
from fleetlearn_device.storage.outbox import Outbox
from fleetlearn_device.storage.state_directory import StateDirectory
from fleetlearn_device.storage.trusted_keys import checked_keys, trust_first
from fleetlearn_device.storage.unmasked import UnmaskedUpdate
from fleetlearn_device.training.algorithms import known_algorithms
from fleetlearn_device.training.data import Data
from fleetlearn_device.training.newest_model import NewestModel
from fleetlearn_device.training.open_data import open_data
from fleetlearn_device.training.pairwise_sessions import NeighbourRules
from fleetlearn_device.training.source_data import SourceData
from fleetlearn_device.training.task_data import TaskDataMaker
from fleetlearn_device.training.trainer import ANSWERS, Trainer

if TYPE_CHECKING:
    from fleetlearn_device.training.own_scores import OwnModel

FEATURE_CACHE = 128
"""MiB of memory for features, unless the user says otherwise: 58,000 examples of a
MobileNetV3-small's 576 numbers."""
CHECKPOINT_EVERY = 60.0
"""Seconds of training, at least, between two checkpoints, unless the user says otherwise."""

LOOK_FOR_EXAMPLES = 2.0
"""Seconds between two looks into a live buffer that holds no record yet."""

_WHY = {
    "SIGTERM": "SIGTERM came",
    "SIGINT": "SIGINT came (Ctrl-C)",
    "SIGHUP": (
        "SIGHUP came (its terminal was closed; nohup or a service keeps a device running without "
        "one)"
    ),
}

log = logging.getLogger("fleetlearn.device")


class Device:
    """A device that serves a coordinator with its own data.

    Args:
        url: ``ws://`` or ``wss://`` address of the coordinator.
        data: What ``open_data`` takes: a path, such as ``"mine.npz"`` or
            ``"mine.csv?x=ax,ay&y=label"``; arrays ((x, y) or {"x": x, "y": y}); a frame; an
            iterable of batches, which needs ``examples``.
        state_dir: Directory for what outlives the process. One device, one directory.
        runtime: ``onnx``, ``ort-training`` or ``auto`` (``onnx``).
        threads: Threads inside an operator.
        provider: Where ``onnx`` computes: ``cpu``, or ``cuda`` (an NVIDIA GPU, with
            onnxruntime-gpu).
        examples: How many examples one pass over an iterable of batches yields, or a function that
            says so where the data grow.
        name: The device's name at its first start. None: a random name.
        ca: PEM file of the only CAs that TLS trusts. None: those that the system trusts.
        certificate, key: PEM files by which a coordinator knows the device that asks for
            certificates.
        insecure: Whether the coordinator may be on another machine and without TLS.
        download_from: Hosts from which the device fetches models and bundles by HTTP where the
            coordinator names one, such as ``"cdn.example.org"``. The coordinator's own host is one,
            unless that is this machine.
        token: Enrols the device with a coordinator that asks for credentials, and may bring keys to
            trust. Needed once.
        trust: The coordinator's public keys: the device then does only tasks that one of them
            signed, at later starts too. Needs the extra ``signatures``.
        feature_cache: Most MiB of memory for what the frozen part of a model makes of each example,
            which is then computed once. For bundles with features, and data that are arrays. 0:
            whole models are trained.
        tags: Names that the coordinator may choose devices by, such as a region: at most 16, of
            letters, digits, ._-.
        tier: The kind of device that this is.
        charging: Whether the device is charging, or a function that says so at each check-in. None:
            as Linux says.
        network: ``metered`` or ``unmetered``, or a function that says which at each check-in. None:
            not stated.
        conditions: What must hold while the device serves. While it does not, the device takes no
            task; one that it is in the middle of is given back, or what was done is reported where
            the plan has a time budget.
        limits: How much of the machine the device may use.
        privacy: What the device demands of a run: differential privacy, and how often it takes part
            at most.
        secure: What the device demands of secure aggregation: that there is some, which helper it
            trusts, and how many updates are added up at least. Needs the extra ``secure``.
        own_model: A file, such as ``mine.onnx``, that each training replaces by the device's own
            model, for any ONNX Runtime: the model as training left it, with its personal
            parameters, or its personal model (Ditto, pFedMe, APFL). None: none is written.
        own_bundle, own_distillation: The device's own model, as ``export_bundle`` and
            ``export_distillation`` made it, for runs in which devices exchange class scores alone
            (FedMD). It never leaves the device. None: the device takes no part in such runs.
        functions: Functions that runs may compute by on this device, or train or encode their
            updates by (docs/start/your-own-algorithm.md): name -> function, of the state and rows
            where it computes (docs/algorithms/functions.md), or ``"module:function"``; or a list of
            such texts. No others are called.
        hold_out: Share of the examples, from 0 to less than 1, that is never trained on: the shared
            and the personal model are measured on it. An example is always on the same side.
        checkpoint_every: Least seconds of training between two checkpoints, from which a later
            process goes on with the task. Writing them takes at most 2 % of the training's time.
            0: none are written, and a training that is interrupted begins again.
        keep_model: Whether the device keeps the newest shared model for ``predict``, ``Predictor``
            and ``fleetlearn-device predict``.
        on_better_model: Called, in the thread that trains, with the model in use each time that it
            is another one. With it, ``keep_model`` is True.
        socket: Path of a UNIX socket by which other programs on this machine use the device, by
            lines of JSON. None: there is none.
        metrics_file: A file, such as ``fleetlearn.prom``, that is replaced when the device's
            numbers change, at most once a minute: for Prometheus' textfile collector. None: none is
            written.
        until_finished: Return when the coordinator says that the training is finished.
        timing: Time limits of the connection.

    Raises DataError, and ValueError on a url, CA, certificate, token, key, runtime, number of
    threads, provider, feature_cache, tag, tier, network or condition that is not allowed, and on a
    condition that cannot be read on this machine.
    """

    def __init__(
        self,
        url: str,
        data: Data | Batch | Iterable[Batch] | str | os.PathLike[str] | Any,
        state_dir: str | os.PathLike[str],
        *,
        runtime: Kind = "auto",
        threads: int = 1,
        provider: ProviderName = "cpu",
        examples: int | Callable[[], int] | None = None,
        name: str | None = None,
        ca: str | os.PathLike[str] | None = None,
        certificate: str | os.PathLike[str] | None = None,
        key: str | os.PathLike[str] | None = None,
        insecure: bool = False,
        download_from: Iterable[str] = (),
        token: str | None = None,
        trust: Iterable[str] = (),
        feature_cache: int = FEATURE_CACHE,
        tags: Iterable[str] = (),
        tier: str | None = None,
        charging: Charging = None,
        network: NetworkNow = None,
        conditions: Conditions = NO_CONDITIONS,
        limits: DeviceLimits = NO_LIMITS,
        privacy: PrivacyDemands = NO_DEMANDS,
        secure: SecureDemands = NO_SECURE_DEMANDS,
        own_model: str | os.PathLike[str] | None = None,
        own_bundle: str | os.PathLike[str] | None = None,
        own_distillation: str | os.PathLike[str] | None = None,
        functions: GivenFunctions = (),
        hold_out: float = 0.0,
        checkpoint_every: float = CHECKPOINT_EVERY,
        keep_model: bool = False,
        on_better_model: Callable[[ModelInUse], object] | None = None,
        socket: str | os.PathLike[str] | None = None,
        metrics_file: str | os.PathLike[str] | None = None,
        until_finished: bool = False,
        timing: Timing | None = None,
    ) -> None:
        self.address = checked_address(
            url, ca=ca, certificate=certificate, key=key, insecure=insecure
        )
        self.sources = http_sources(url, download_from, insecure=insecure)
        self._ca = None if ca is None else in_home(ca)
        secret, brought = read_token(token) if token is not None else (None, ())
        self.token: str | None = secret
        self.trust = checked_keys([*trust] or brought)
        check_choices(runtime, threads, provider)
        if feature_cache < 0:
            raise ValueError(
                f"feature_cache is {feature_cache}; expected MiB, or 0 to keep no features"
            )
        self.state_dir, self.name = in_home(state_dir), name
        self.runtime: Kind = "onnx" if runtime == "auto" else runtime
        self.threads, self.until_finished, self.timing = threads, until_finished, timing or Timing()
        self.provider: ProviderName = provider
        self.feature_cache = feature_cache
        if not checkpoint_every >= 0:
            raise ValueError(
                f"checkpoint_every is {checkpoint_every}; expected seconds, or 0 for no checkpoints"
            )
        self.checkpoint_every = checkpoint_every
        self.keep_model = keep_model or on_better_model is not None
        self.on_better_model = on_better_model
        self._predictors: dict[Which, Predictor] = {}
        self._predictors_lock = threading.Lock()
        self.own_model = None if own_model is None else in_home(own_model)
        self.own_bundles = _own_bundles(own_bundle, own_distillation)
        if self.own_bundles is not None:
            if self.runtime == "ort-training":
                raise ValueError('own_bundle is trained by the runtime "onnx"')
            self._open_own()  # fails here rather than in the first task
        self.functions = read_functions(functions)
        self.metrics_file = None if metrics_file is None else in_home(metrics_file)
        if conditions.unmetered and network is None:
            network = partial(read_network, SystemFiles())
        check_limits(limits)
        self.limits = limits
        check_demands(privacy)
        self.privacy = privacy
        check_secure_demands(secure)
        self.secure = secure
        self._ceiling = None if limits.memory is None else MemoryCeiling(limits.memory)
        self.description = Description(tags, tier, charging, network)
        self.conditions = make_conditions(conditions, self.state_dir, ask_owner(network))
        self.data = open_data(data, examples)
        self.hold_out = hold_out
        TaskDataMaker(self.data, hold_out)  # fails here rather than in the first task
        self.stopped_by: signal.Signals | None = None
        """The signal that ended ``run``."""
        self.tells_systemd = False
        """Whether ``serve`` tells systemd that the process is ready, alive and stopping.
        ``fleetlearn-device run`` sets it: its process does nothing else."""
        self.paused = False
        """Whether ``pause`` was called, and ``resume`` not since."""
        self.socket = None if socket is None else in_home(socket)
        self._background: BackgroundRun | None = None
        self._pause: Callable[[], object] | None = None
        self._stopped = False
        self._stop: Callable[[], object] | None = None

    def start(self) -> None:
        """Serve in a thread of its own, and return at once: in a program with another main loop, or
        a cell of a notebook. Sets no signal handlers.

        Call ``stop`` and ``join`` before the program ends, or use the device as a context manager:
        ``with device: ...``. Raises RuntimeError where it serves already.
        """
        if self._background is not None and self._background.running:
            raise RuntimeError("the device was started already; stop() and join() end that")
        self._background = BackgroundRun(self.serve, f"fleetlearn {self.state_dir}")

    def join(self, seconds: float | None = None) -> bool:
        """Wait until what ``start`` began has ended, for at most ``seconds``. Returns whether it
        has.

        Raises what ``serve`` raises.
        """
        return self._background is None or self._background.join(seconds)

    def __enter__(self) -> Device:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.join()

    def run(self) -> None:
        """Serve until SIGTERM, SIGINT or SIGHUP, or until the training is finished
        (``until_finished``).

        A task under way is given back; a finished update stays in the state directory for the next
        start. A second signal ends the process at once. The process's signal handlers are as before
        when it returns. Raises what ``serve`` raises, and RuntimeError where an event loop runs in
        this thread: await ``serve`` there, or call ``start``.
        """
        refuse_in_loop("run", "device.serve()")
        asyncio.run(self._serve_until_signal())

    async def serve(self) -> None:
        """Serve until ``stop``, or until the training is finished (``until_finished``).

        Raises StateError (the directory is in use, damaged, full), DataError (the data do not fit
        the bundle), RuntimeUnavailableError, FleetError (signatures cannot be checked, or secure
        aggregation is required and cannot be done here),
        ProtocolError (the coordinator refuses the check-in; ``replaced``: another process speaks
        for the same device), NoConnectionError (a device that was never let in has a token or a
        credential that is refused).

        With ``until_finished`` it also raises ProtocolError where the coordinator speaks another
        version (``bad-version``), and NoConnectionError where TLS fails, where the device is no
        longer let in, and where no connection can be had for ``timing.give_up`` seconds. Without
        it, the device says each time what is wrong and goes on trying, slowly: a certificate or a
        coordinator can be mended while it waits.
        """
        try:
            if not self._stopped:
                await self._serve()
        finally:
            self._stopped = False

    async def _serve(self) -> None:
        module = import_training_api() if self.runtime == "ort-training" else import_onnxruntime()
        runtime_version = getattr(module, "__version__", None) or import_onnxruntime().__version__
        open_provider(self.provider)  # fails here rather than in each task
        where = "" if self.provider == "cpu" else f" on {self.provider}"
        if self.secure.require:
            need_cryptography()
        directory = StateDirectory(self.state_dir, self.name)
        if self.limits.cache is not None:
            directory.contents.quota = round(self.limits.cache * 2**20)
        quota, pacing = limit_cpu(self.limits.cpu, self.threads)
        try:
            await self._wait_for_examples()
            if self._stopped:
                return
            await asyncio.to_thread(self._look_at_data, directory.path)
            keys = trust_first(directory.path, self.trust)
            if self.privacy.participations is not None:
                directory.update_counts.check()
            held = directory.outbox.load()
            waits = None if held is not None else self._still_waits(directory.outbox)
            if held is not None or waits is not None:
                # A process that died between the two left the checkpoint of a finished training.
                directory.checkpoint.clear()
            session = Session(
                directory.device,
                max(1, round(self.data.examples * (1 - self.hold_out))),
                runtime=f"{self.runtime} {runtime_version}{where}",
                software=f"fleetlearn {installed_version()}",
                algorithms=known_algorithms(
                    self.runtime,
                    own=self.own_bundles is not None,
                    functions=bool(self.functions),
                ),
                functions=(*self.functions,),
                exchanges=_exchanges(),
                held=held,
                unmasked=None if waits is None else _waits(waits),
                trusted=Trusted(keys, find_verifier()) if keys else None,
                until_finished=self.until_finished,
                demands=self.privacy,
                secure_demands=self.secure,
                can_mask=has_cryptography(),
                can_choose_rows=self.runtime != "ort-training",
                took_part=directory.update_counts.of,
                was_made=directory.update_counts.made,
                sources=self.sources,
            )
            features = self.feature_cache * 2**20
            enrolment = Enrolment(directory.path, directory.device, self.token)
            newest = None
            if self.keep_model:
                newest = NewestModel(ModelsInUse(directory.path), self.on_better_model)
            kind, threads, provider = self.runtime, self.threads, self.provider
            trainer = Trainer(
                directory,
                self.data,
                kind,
                threads,
                provider,
                features,
                self.own_model,
                self.checkpoint_every,
                newest,
                self.hold_out,
                pacing=pacing,
                ceiling=self._ceiling,
                owner=_owner(self.secure),
                own=self._open_own(),
                functions=self.functions,
            )
            metrics = self.metrics_file and MetricsFile(self.metrics_file, directory.device)
            driver = Driver(
                self.address,
                enrolment,
                self.timing,
                directory,
                trainer,
                session,
                self.description,
                ConditionWatch(self.conditions, self.timing.paused),
                self.limits,
                on_change=metrics.update if metrics else None,
                ca=self._ca,
            )
            loop = asyncio.get_running_loop()
            self._stop = lambda: loop.call_soon_threadsafe(driver.stop)
            self._pause = lambda: loop.call_soon_threadsafe(
                driver.pause if self.paused else driver.resume
            )
            if self._stopped:  # while the directory was opened
                self._stop()
            if self.paused:
                driver.pause()
            async with serve_programs(self.socket, self):
                await self._run(driver)
        finally:
            self._stop = self._pause = None
            if quota is not None:
                quota.undo()
            directory.close()

    def _open_own(self) -> OwnModel | None:
        """Return the device's own model, or None. Raises ValueError."""
        if self.own_bundles is None:
            return None
        # Late: most devices have none.
        from fleetlearn_device.training.own_scores import OwnModel

        try:
            return OwnModel(*self.own_bundles, self.threads, self.provider)
        except BundleError as error:
            raise ValueError(f"the device's own model: {error.text}") from None

    def _still_waits(self, outbox: Outbox) -> UnmaskedUpdate | None:
        """Return the update that an earlier process did not mask yet. One that the owner's demands
        forbid by now is dropped: its task is given back when the coordinator gives it again."""
        waits = outbox.load_unmasked()
        if waits is None or (refused := secure_refusal(self.secure, waits.task)) is None:
            return waits
        name = waits.task.task
        log.warning("the update of task %s is dropped before it is masked: %s", name, refused.text)
        outbox.drop(name)
        return None

    async def _run(self, driver: Driver) -> None:
        if not self.tells_systemd:
            await driver.run()
            return
        notify_systemd(READY)
        alive = asyncio.create_task(tell_alive(driver.work_now))
        try:
            await driver.run()
        finally:
            notify_systemd(STOPPING)
            alive.cancel()

    def _look_at_data(self, folder: Path) -> None:
        """Warn where the data do not fit the bundle that the device used last: its next task may be
        hours away."""
        manifest = cached_manifest(folder)
        # The arrays of public examples are not the device's data.
        if manifest is None or manifest.public is not UNSET:
            return
        try:
            TaskDataMaker(self.data, self.hold_out).of(manifest)
        except DataError as error:
            log.warning(
                "the data do not fit the bundle %s, which this device used last: %s",
                manifest.name,
                error,
            )

    async def _wait_for_examples(self) -> None:
        """Wait until there are examples, or until ``stop``: a live buffer holds none at first."""
        data, loop, stopped = self.data, asyncio.get_running_loop(), asyncio.Event()
        self._stop = lambda: loop.call_soon_threadsafe(stopped.set)
        if not isinstance(data, SourceData) or data.examples:
            return
        log.info("waiting: %s holds no record yet", data.source.name)
        alive: list[asyncio.Task[None]] = []
        if self.tells_systemd:  # which would end a process that is not ready in time
            notify_systemd(READY)
            alive.append(asyncio.create_task(tell_alive(lambda: None)))
        try:
            while not (self._stopped or data.examples):
                with suppress(TimeoutError):
                    async with timeout(LOOK_FOR_EXAMPLES):
                        await stopped.wait()
                await asyncio.to_thread(data.look)
        finally:
            for task in alive:
                task.cancel()

    def predict(
        self,
        x: ArrayLike | Mapping[str, ArrayLike],
        *,
        which: Which = "personal",
        batch_size: int = BATCH,
    ) -> Predicted:
        """Return the outputs of the model in use for these examples; ``Predictor`` says which
        arguments it takes and what it returns.

        May be called from any thread, while the device serves and while it does not; training goes
        on meanwhile. Raises what ``Predictor`` and ``Predictor.predict`` raise.
        """
        with self._predictors_lock:
            if which not in self._predictors:
                self._predictors[which] = Predictor(self.state_dir, which=which)
            predictor = self._predictors[which]
        return predictor.predict(x, batch_size)

    def pause(self) -> None:
        """Take no tasks until ``resume``; from any thread. A training ends within a step. Its task
        is kept for as long as its lease lives, if at least 10 s of work are done, and given back
        otherwise; a finished update is sent. The connection is closed."""
        self.paused = True
        if self._pause is not None:
            self._pause()

    def resume(self) -> None:
        """End ``pause``; from any thread. Conditions count as ever."""
        self.paused = False
        if self._pause is not None:
            self._pause()

    def stop(self) -> None:
        """End ``serve`` soon, from any thread; if it has not begun, it ends as soon as it does."""
        self._stopped = True
        if self._stop is not None:
            self._stop()

    async def _serve_until_signal(self) -> None:
        loop = asyncio.get_running_loop()

        def caught(number: signal.Signals) -> None:
            log.info("stopping: %s", _WHY[number.name], extra=said("stopping"))
            self.stopped_by = number
            loop.remove_signal_handler(number)  # so that a second one ends the process
            self.stop()

        with stop_signals(loop, caught):
            await self.serve()


def _exchanges() -> tuple[str, ...]:
    """Return the kinds of questions that the device can answer."""
    return tuple(kind for kind in ANSWERS if kind != PAIRWISE or has_cryptography())


def _own_bundles(
    bundle: str | os.PathLike[str] | None, distillation: str | os.PathLike[str] | None
) -> tuple[Path, Path] | None:
    """Return the paths of the device's own model, or None. Raises ValueError where one of the two
    is missing."""
    if bundle is None and distillation is None:
        return None
    if bundle is None or distillation is None:
        raise ValueError(
            "own_bundle and own_distillation go together: the second is what export_distillation "
            "makes of the model of the first"
        )
    return in_home(bundle), in_home(distillation)


def _owner(demands: SecureDemands) -> NeighbourRules:
    """Return what the owner wants of sessions in which masks are agreed on. Raises RosterError."""
    roster = None if demands.roster is None else dict(read_roster(in_home(demands.roster)))
    return NeighbourRules(roster, demands.minimum)


def _waits(update: UnmaskedUpdate) -> Unmasked:
    """Return what a session must know of an update that an earlier process did not mask yet."""
    secure = update.task.secure
    assert secure is not None
    assert secure.least_factor is not None  # else it was masked at once
    return Unmasked(update.task.task, update.task.round, secure.least_factor)
