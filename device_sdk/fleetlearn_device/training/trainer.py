"""Carries out a task's training in a separate thread, from the files in the state directory to a
report."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
from fleetlearn_protocol.algorithms import FEDMD, OWN, of_step
from fleetlearn_protocol.bundle import Bundle, open_bundle
from fleetlearn_protocol.computations.settings import KIND_NAMES
from fleetlearn_protocol.encodings import FLOAT32, find_encoding
from fleetlearn_protocol.errors import BundleError
from fleetlearn_protocol.exchanges import EVALUATION, FIT, FitAnswer, content_of, fields_of
from fleetlearn_protocol.formats.whole import rows_to_bytes
from fleetlearn_protocol.manifest import EVAL, MANIFEST, TRAIN, Manifest
from fleetlearn_protocol.messages import (
    MAX_PIECES,
    MAX_SELECTED_BYTES,
    MODEL,
    MOST_ROWS,
    ROWS,
    SUMS,
    UPDATE,
    ContentSelection,
    Evaluation,
    Question,
    Reply,
    Report,
    Task,
    VectorReference,
    encode,
)
from fleetlearn_protocol.quality_messages import QUALITY, QualityAnswer
from fleetlearn_protocol.secure.pairwise_messages import PAIRWISE, PairwiseAnswer
from fleetlearn_protocol.sparse_rows import selected_bytes, selection_of
from fleetlearn_protocol.user_errors import ANY_FAILURE
from fleetlearn_protocol.vector import Vector, digest
from msgspec import UNSET

from fleetlearn_device.limits.memory import MemoryCeiling
from fleetlearn_device.limits.pacing import Pacing
from fleetlearn_device.own_code import NO_FUNCTIONS, OwnFunctions
from fleetlearn_device.runtimes.checks import check_hyper
from fleetlearn_device.runtimes.import_onnxruntime import ran_out_of_memory
from fleetlearn_device.runtimes.open_runtime import open_runtime
from fleetlearn_device.runtimes.providers import ProviderName
from fleetlearn_device.runtimes.runtime import Kind, Runtime
from fleetlearn_device.storage.content_cache import needed_files
from fleetlearn_device.storage.errors import StateError
from fleetlearn_device.storage.state_directory import StateDirectory
from fleetlearn_device.storage.tied_vectors import file_size
from fleetlearn_device.storage.unmasked import UnmaskedUpdate
from fleetlearn_device.training.algorithms import (
    ALGORITHMS,
    check_step,
    personal_size,
    run_algorithm,
)
from fleetlearn_device.training.data import ArrayData, Data
from fleetlearn_device.training.data_quality import measure_features
from fleetlearn_device.training.features import FeatureCache, FeatureData, graphs_of
from fleetlearn_device.training.kept_state import kept_state_size, load_model
from fleetlearn_device.training.local_noise import withheld
from fleetlearn_device.training.newest_model import NewestModel
from fleetlearn_device.training.own_algorithm import allowed_algorithm, open_task_encoding
from fleetlearn_device.training.own_model import write_own_model
from fleetlearn_device.training.pairwise_sessions import ANY, NeighbourRules, PairwiseSessions
from fleetlearn_device.training.progress import Checkpoint, Progress, read_checkpoint
from fleetlearn_device.training.secure_update import (
    check_helper,
    check_whole,
    masked_memory,
    masked_report,
    room_for,
    share_of_task,
    trained_parts,
    unmasked_update,
    words_of_sums,
    words_of_update,
)
from fleetlearn_device.training.sent_parts import (
    check_parts,
    encode_parts,
    residual_of,
    tied_as_sent,
)
from fleetlearn_device.training.source_data import SourceData
from fleetlearn_device.training.sub_model import SubModel, find_sub_model
from fleetlearn_device.training.task_data import TaskData, TaskDataMaker
from fleetlearn_device.training.train import (
    EVALUATION_BATCH,
    LARGEST,
    DivergedError,
    OutOfTimeError,
    StoppedError,
    TrainingError,
    evaluate_data,
)
from fleetlearn_device.training.work import Inputs, TaskOutcome, TaskSettings

if TYPE_CHECKING:
    from fleetlearn_device.training.own_scores import OwnModel

REST = 0.5
"""Seconds after which a training that rests looks whether it is to end."""
MAX_STARTS = 3
"""The device gives a task back after this many processes died during its training."""


log = logging.getLogger("fleetlearn.device")


class KilledError(TrainingError):
    """The process died too often during this task's training."""


class FinishedUpdate(NamedTuple):
    """What a task's training leaves, to be saved together."""

    report: Report
    contents: Sequence[memoryview]
    """The bytes of each of the report's parts."""
    bundle: str
    """SHA-256 of the bundle's manifest."""
    kept_state: Vector
    """For the device's next task of this bundle: float32, shape (kept_state_size,)."""
    tied: Mapping[str, Vector]
    """Vectors by name, for a later task that goes on from this one: float32, shape (P,)."""
    personal: Vector | None
    """The personal model for the device's next task of this bundle: float32, shape (P,). None:
    there is none."""
    later: UnmaskedUpdate | None = None
    """What is known of an update that is not masked yet; ``report`` is its report, and nothing of
    it is sent. None: the update is as it is sent."""


class Trainer:
    """One device's training. Another thread may read ``steps`` and ``batches``, and set ``halt``
    and ``enough``."""

    def __init__(
        self,
        directory: StateDirectory,
        data: Data,
        kind: Kind,
        threads: int,
        provider: ProviderName = "cpu",
        feature_cache: int = 0,
        own_model: Path | None = None,
        checkpoint_every: float = 0.0,
        newest: NewestModel | None = None,
        hold_out: float = 0.0,
        pacing: Pacing | None = None,
        ceiling: MemoryCeiling | None = None,
        owner: NeighbourRules = ANY,
        own: OwnModel | None = None,
        functions: OwnFunctions = NO_FUNCTIONS,
    ) -> None:
        """feature_cache: most bytes of features that are kept; 0: whole models are trained.
        own_model: the file that each training replaces by the device's own model.
        checkpoint_every: least seconds of training between two checkpoints; 0: there are none.
        newest: takes the shared models into use. None: none is. hold_out: share of the examples
        that is measured on and not trained on; 0: each new model is taken.
        pacing: says how long to rest after each batch. ceiling: the memory that may be used.
        owner: what the device's owner wants of sessions in which masks are agreed on.
        own: the device's own model, for runs that exchange class scores. None: it has none.
        functions: those that the owner lets computations call."""
        self._own, self._functions = own, functions
        self.kind: Kind = kind
        self.own_model = own_model
        self.from_features = (
            feature_cache > 0
            and kind != "ort-training"
            and isinstance(data, ArrayData | SourceData)
        )
        """Whether training is from features if the bundle has any. Batches that the user makes may
        be others each time: their features are not kept."""
        self.features: FeatureCache | None = None
        """The features of the last task's bundle, if training was from features."""
        self._feature_cache = feature_cache
        self.steps = 0
        """Optimizer steps of the task that are done."""
        self.batches = 0
        """Batches that are done: those of features, the evaluation's, and one for each step."""
        self.halt = threading.Event()
        """While it is set, training ends before its next step."""
        self.keep_when_stopped = False
        """Whether a training that ``halt`` ends is to go on in a later process."""
        self.enough = threading.Event()
        """While it is set, training ends after its next step, and what was done is reported. Before
        its first step it ends without a result."""
        self._newest = newest
        self.needs_infer = own_model is not None or newest is not None
        """Whether infer.onnx is needed as well."""
        self._checkpoint, self._checkpoint_every = directory.checkpoint, checkpoint_every
        self._progress: Progress | None = None
        """Of the task that is in training."""
        self._pacing, self._ceiling = pacing, ceiling
        self._check_memory: Callable[[], None] = lambda: None
        """Raises MemoryError where the process has more memory than it may."""
        self._directory = directory
        self._sessions = PairwiseSessions(directory.device, directory.path, owner)
        self._contents, self._outbox = directory.contents, directory.outbox
        self._kept_states, self._tied_vectors = directory.kept_states, directory.tied_vectors
        self._starts = directory.training_starts
        self._data, self._threads = TaskDataMaker(data, hold_out), threads
        self._provider: ProviderName = provider
        self.counted: int | None = None
        """Examples that the last complete pass gave, or several passes in the mean."""
        self.own_report: Report | None = None
        """The last training's report before anything was left out that the coordinator is not to
        know: for the owner's log. None: there was no training yet."""
        self._noted: tuple[int, int] | None = None
        """The last (found, stated) numbers of examples of which the log has a line."""
        self._opened: tuple[Bundle, Runtime] | None = None
        self._chosen: tuple[str, SubModel] | None = None
        """A task's name, and the sub-model that it is for."""

    def train(self, task: Task, seconds: float) -> FinishedUpdate:
        """Train for at most ``seconds``, opening the bundle included.

        Training begins with the round's model, the kept state from the last task of this bundle,
        whether or not that task's update was accepted, and the tied vectors that the task names.
        Room for the result is held on the disk from before the first step until the result is
        saved.

        Raises what ``open_runtime`` and ``run_algorithm`` raise, DivergedError also on a part that
        its encoding cannot hold, ProtocolError on a vector that is not finite, KilledError,
        MemoryError, StateError.
        """
        end = time.monotonic() + seconds
        self.keep_when_stopped = False
        found = self._find_checkpoint(task)
        with self._counted_start(task.task, 0 if found is None else found.starts):
            try:
                if task_computes(task):
                    return self._compute(task, end)
                if task.algorithm == FEDMD:
                    return self._exchange_scores(task, end)
                return self._train(task, end, found)
            finally:
                self._progress = None

    @property
    def worth_keeping(self) -> bool:
        """Whether so much of the training is done that a device that stops had better go on with
        the task later."""
        progress = self._progress
        return self._checkpoint_every > 0 and progress is not None and progress.worth_keeping

    def forget_checkpoint(self) -> None:
        """Delete the checkpoint: its task is over. Raises StateError."""
        self._checkpoint.clear()

    def answer(self, task: Question, seconds: float) -> Reply:
        """Work out what is asked (``ANSWERS``), for at most ``seconds``.

        Changes nothing that the next training builds on. Raises what ``train`` raises.
        """
        begin = time.monotonic()
        with self._counted_start(task.task):
            content = ANSWERS[task.kind](self, task, seconds)
        message = Reply(task.task, task.kind, fields_of(content), time.monotonic() - begin)
        encode(message)  # raises here what the coordinator would refuse
        content_of(message)
        return message

    def evaluate(self, task: Question, seconds: float) -> Evaluation:
        """Return the question's model measured on the device's data, with the device's own
        parameters if the bundle has any, in at most ``seconds``."""
        assert task.bundle is not None  # the session has seen to that
        end = time.monotonic() + seconds
        with self._bundle_rechecked(task.bundle):
            model = self._read_vector(task.vector(MODEL))
            bundle, runtime = self._open(task, model)
            data = self.task_data(bundle)
            self._offer(task, bundle, runtime, data.held_out)
            load_model(runtime, bundle, model, self._kept_state(bundle))
            with self._within(seconds):
                evaluation = self._measure(runtime, data.measured, end)
            if data.held_out is None:
                self.counted = evaluation.examples
        return evaluation

    def fit(self, task: Question, seconds: float) -> FitAnswer:
        """Return how well each of the question's models fits the device's data, with the device's
        own parameters if the bundle has any, in at most ``seconds``."""
        assert task.bundle is not None  # the session has seen to that
        end, examples, losses = time.monotonic() + seconds, 0, []
        with self._bundle_rechecked(task.bundle):
            for name in content_of(task).models:
                model = self._read_vector(task.vector(name))
                bundle, runtime = self._open(task, model)
                load_model(runtime, bundle, model, self._kept_state(bundle))
                try:
                    with self._within(seconds):
                        found = self._measure(runtime, self.task_data(bundle).measured, end)
                except DivergedError as error:
                    diverged, loss = error, LARGEST
                else:
                    examples, loss = found.examples, found.loss_sum / found.examples
                losses.append(loss)
        if not examples:
            raise diverged
        return FitAnswer(examples, tuple(losses))

    def _measure(self, runtime: Runtime, data: Data, end: float) -> Evaluation:
        """Measure the loaded model until ``end``, on the clock of ``time.monotonic``."""

        def must_stop() -> bool:
            return self.halt.is_set() or time.monotonic() > end

        return evaluate_data(runtime, data, should_stop=must_stop, on_batch=self._count_batch)

    @contextmanager
    def _within(self, seconds: float) -> Iterator[None]:
        """Raise OutOfTimeError where a measurement was stopped for no other reason."""
        try:
            yield
        except StoppedError as error:
            if self.halt.is_set():
                raise
            raise OutOfTimeError(
                f"the measurement took longer than the {seconds:.3g} s that were left"
            ) from error

    def look_at_data(self, task: Question, seconds: float) -> QualityAnswer:
        """Return the moments of the features of the device's training examples, and the question's
        model measured as in ``evaluate``, in at most ``seconds``."""
        end = time.monotonic() + seconds
        try:
            evaluation = self.evaluate(task, seconds)
        except DivergedError:  # that there are values that are not finite is an answer too
            evaluation = None
        assert self._opened is not None  # by ``evaluate``
        inputs = self._opened[0].manifest.batch
        data = self._data.of(self._opened[0].manifest).training.fit(inputs)
        with self._within(seconds):
            return measure_features(
                data, inputs, evaluation, lambda: self.halt.is_set() or time.monotonic() > end
            )

    def agree_on_masks(self, task: Question, seconds: float) -> PairwiseAnswer:
        """Return what the device says in the session of a round."""
        return self._sessions.answer(task)

    @contextmanager
    def _counted_start(self, task_id: str, counted: int = 0) -> Iterator[None]:
        """Count the task's start durably while the block runs: it may kill the process. Raises
        KilledError. ``counted``: starts before the last checkpoint, and its own; what a process
        did before it died then was not for nothing."""
        self.steps = self.batches = 0
        self._check_memory = lambda: None
        if self._pacing is not None:
            self._pacing.begin()
        deaths = self._starts.count(task_id) - max(counted - 1, 0)
        if deaths >= MAX_STARTS:
            raise KilledError(
                f"the task killed the process {deaths} times, most likely for lack of memory; it "
                "is not begun again"
            )
        self._starts.add(task_id)
        try:
            yield
        except ANY_FAILURE as error:
            self._outbox.release()
            if not ran_out_of_memory(error):
                raise
            self._opened = self.features = None  # what they hold may be what others lack
            if isinstance(error, MemoryError):
                raise
            raise MemoryError(str(error)) from error
        finally:
            self._starts.clear()

    def _find_checkpoint(self, task: Task) -> Checkpoint | None:
        """Return what an earlier process did of this task. Raises StateError."""
        stored = self._checkpoint.load(task_fingerprint(task))
        if stored is None or not self._checkpoint_every:
            return None
        found = read_checkpoint(*stored)
        if found is None:
            _warn_of_checkpoint(task, "another version")
        return found

    def _begin_progress(
        self, task: Task, found: Checkpoint | None, manifest: Manifest, data: TaskData
    ) -> Progress:
        """Return the task's progress, from which its training goes on."""
        if found is not None and (found.local.size, found.state.size) != (
            manifest.local_size,
            manifest.state_size,
        ):
            found = None
        if found is not None:
            self.batches = found.batches
            log.info(
                "task %s: training goes on after step %d, where an earlier process left it",
                task.task,
                found.part.done.steps,
            )
        save = partial(self._save_checkpoint, task_fingerprint(task))
        self._progress = Progress(
            found,
            save if self._checkpoint_every else None,
            every=self._checkpoint_every,
            examples=data.training.examples,
            fingerprint=self._fingerprint(data.training),
            rows=data.rows,
            starts=self._starts.count(task.task),
            batches=lambda: self.batches,
            keep_when_stopped=lambda: self.keep_when_stopped,
        )
        return self._progress

    def _save_checkpoint(self, task: str, content: bytes, vectors: Mapping[str, Vector]) -> int:
        """Save a checkpoint and return its bytes. Where that fails, warn: the training must not be
        lost for it."""
        try:
            return self._checkpoint.save(task, content, vectors)
        except StateError as error:
            log.warning("no checkpoint of the training could be saved: %s", error)
            return 4 * sum(vector.size for vector in vectors.values())  # so that it waits as long

    def _compute(self, task: Task, end: float) -> FinishedUpdate:
        """Do a task of a computation, which needs no runtime and keeps nothing."""
        # Late: most devices never compute sums.
        from fleetlearn_protocol.computations.kinds import KINDS

        from fleetlearn_device.training.computing import check_computation, compute

        with self._bundle_rechecked(task.bundle):
            state = self._read_vector(task.vector(MODEL))
            self._opened = self.features = None  # room for the rows
            bundle = open_bundle(self._contents.bundle_path(task.bundle), files=())
            check_computation(task, bundle.manifest, self._functions)
            self._limit_memory(task, bundle)
            self._outbox.reserve(_room(task, bundle.manifest)[0], 0, 0, 0, 0)
            found = compute(
                task,
                bundle.manifest,
                state,
                self.task_data(bundle),
                end=end,
                should_stop=lambda: self.halt.is_set() or self.enough.is_set(),
                on_batch=lambda batches: self._count(batches, 0.0),
                functions=self._functions,
            )
            if KINDS[task.algorithm].infer is not None and self._newest is not None:
                reference = task.vector(MODEL)
                stored = self._contents.vector(reference.sha256)
                # Nothing is held out of sums, and so nothing measures their state.
                self._newest.offer(bundle, reference, stored, lambda model: None)
        report, content = found.plain()
        self.counted, self.own_report = report.examples, report
        if task.secure is not None:
            silent, words = withheld(found.report, task), words_of_sums(task, found.sums)
            report, content = masked_report(task, silent, words, self._directory, self._sessions)
        return FinishedUpdate(report, (content,), task.bundle, np.zeros(0, np.float32), {}, None)

    def _exchange_scores(self, task: Task, end: float) -> FinishedUpdate:
        """Do a task of FedMD with the device's own model, whose bundle names what is kept. No
        checkpoint is made of it."""
        open_task_encoding(task, self._functions)
        own, asked = self._own, trained_parts(task)
        assert own is not None  # else the session gave the task back
        names, kept_under = residual_of(asked), own.bundle.sha256
        with self._bundle_rechecked(task.bundle):
            consensus = self._read_vector(task.vector(MODEL))
            self._opened = self.features = None  # room for the device's own model
            public = open_bundle(self._contents.bundle_path(task.bundle), files=())
            own.check(public.manifest)
            self._limit_memory(task, own.bundle)
            tied = self._tied_vectors.begin(kept_under, task.kept, consensus.size) if names else {}
            update_bytes, unmasked_bytes = _room(task, public.manifest)
            self._outbox.reserve(
                update_bytes,
                4 * own.kept_size,
                file_size(names, consensus.size),
                4 * own.size,
                unmasked_bytes,
            )
            whole = self.task_data(own.bundle)
            found = own.exchange(
                public,
                consensus,
                self._kept_states.load_personal(kept_under, own.size),
                self._kept_state(own.bundle),
                whole.training,
                self._settings(task, whole, end - time.monotonic()),
            )
            check_whole(task, complete=found.result.complete)
            if self.own_model is not None:
                write_own_model(self.own_model, own.bundle, found.model)
        parts = {UPDATE: found.scores - consensus}
        outcome = TaskOutcome(found.result, parts, {}, found.model)
        return self._finished(task, outcome, tied, public.manifest, whole.training, kept_under)

    def _settings(self, task: Task, whole: TaskData, seconds: float) -> TaskSettings:
        """Return how a task is done. seconds: the most that it may take."""
        return TaskSettings(
            hyper=task.hyper,
            epochs=task.epochs,
            batch_size=task.batch_size,
            seed=task.seed,
            time_budget=seconds if task.time_budget is None else min(seconds, task.time_budget),
            # Where a device sends no measurement, it need not be made.
            evaluate=task.evaluate and not _withholds(task),
            held_out=whole.held_out,
            counted=self.counted,
            should_stop=self._must_stop,
            should_finish=self.enough.is_set,
            on_step=self._count,
            on_evaluated=self._count_batch,
            personal_epochs=task.personal_epochs,
            schedule=task.schedule,
        )

    def _train(self, task: Task, end: float, found: Checkpoint | None) -> FinishedUpdate:
        if task.algorithm == OWN:
            allowed_algorithm(task, self._functions)  # before anything is opened
        open_task_encoding(task, self._functions)
        asked = trained_parts(task)
        algorithm = ALGORITHMS[task.algorithm]
        names = (*algorithm.tied, *residual_of(asked))
        with self._bundle_rechecked(task.bundle):
            sub = self._sub_model(task)
            vectors = {
                reference.name: self._read_vector(reference, sub) for reference in task.vectors
            }
            model = vectors.pop(MODEL)
            bundle, runtime = self._open(task, model, sub)
            size = bundle.manifest.size
            check_step(task.algorithm, bundle.manifest)  # before tied vectors are deleted
            check_parts(asked, bundle.manifest)
            tied = self._tied_vectors.begin(task.bundle, task.kept, size) if names else {}
            own_size = personal_size(task.algorithm, bundle.manifest)
            update_bytes, unmasked_bytes = _room(task, bundle.manifest)
            self._outbox.reserve(
                update_bytes,
                4 * kept_state_size(bundle.manifest),
                file_size(names, size),
                4 * own_size,
                unmasked_bytes,
            )
            whole = self.task_data(bundle) if sub is None else sub.data
            if found is not None and sub is None and found.rows not in (None, whole.rows):
                # Records that came since are for later tasks.
                earlier = self.task_data(bundle, found.rows)
                if self._is_of(found, earlier.training):
                    whole = earlier
            data = whole.training
            self._offer(task, bundle, runtime, whole.held_out)
            if found is not None and not self._is_of(found, data):
                _warn_of_checkpoint(task, "other data")
                found = None
            spent = 0.0 if found is None else found.seconds
            progress = self._begin_progress(task, found, bundle.manifest, whole)
            settings = self._settings(task, whole, spent + end - time.monotonic())
            settings = settings._replace(progress=progress)
            if task.algorithm == OWN:
                settings = settings._replace(own=allowed_algorithm(task, self._functions))
            personal = self._kept_states.load_personal(task.bundle, size if own_size else 0)
            inputs = Inputs(model, self._kept_state(bundle), vectors, tied, personal)
            outcome = run_algorithm(task.algorithm, runtime, bundle, data, inputs, settings)
            check_whole(task, complete=outcome.result.complete)
            if self.own_model is not None:
                own = runtime.local if outcome.personal is None else outcome.personal[:size]
                self._write_own_model(self.own_model, task, bundle, own, sub)
        return self._finished(task, outcome, tied, bundle.manifest, data, task.bundle, sub)

    def _write_own_model(
        self, path: Path, task: Task, bundle: Bundle, own: Vector, sub: SubModel | None
    ) -> None:
        if sub is not None:  # the whole model was fetched for this
            own = sub.whole(self._read_vector(task.vector(MODEL)), own)
            bundle = open_bundle(bundle.path, files=())
        write_own_model(path, bundle, own)

    def choose_rows(self, task: Task) -> None:
        """Find out which rows of the bundle's tables the data name, where the task is for a
        sub-model and its manifest is here. Call it in the training's thread. Raises DataError."""
        self._chosen = None
        if ROWS not in task.parts or task.bundle is None:
            return
        path = self._contents.bundle_path(task.bundle)
        if (path / MANIFEST).exists():
            bundle = open_bundle(path, files=())
            self._chosen = task.task, find_sub_model(bundle.manifest, self.task_data(bundle))

    def pieces(self, manifest: Manifest, vector: VectorReference) -> ContentSelection | None:
        """Return the pieces of a vector of the task that the device needs; None: all of it."""
        if self._chosen is None or self.needs_infer or manifest.sparse is UNSET:
            return None
        item = find_encoding(vector.encoding).block_bytes
        sub = self._chosen[1]
        if len(sub.rows) > MOST_ROWS or len(sub.layout.segments) > MAX_PIECES:
            return None
        selection = selection_of(sub.layout, sub.rows, item)
        fits = selected_bytes(selection) <= min(vector.size, MAX_SELECTED_BYTES)
        return selection if fits else None

    def _sub_model(self, task: Task) -> SubModel | None:
        """Return what of the model the task is for; None: all of it."""
        if ROWS not in task.parts:
            return None
        if self._chosen is None or self._chosen[0] != task.task:
            self.choose_rows(task)
        assert self._chosen is not None
        return self._chosen[1]

    def _finished(
        self,
        task: Task,
        outcome: TaskOutcome,
        tied: Mapping[str, Vector],
        manifest: Manifest,
        data: Data,
        kept_under: str,
        sub: SubModel | None = None,
    ) -> FinishedUpdate:
        """Return what is saved of a task, its parts encoded as the task asks.

        tied: the vectors that the task went on from. manifest: of the task's bundle. data: what was
        trained on. kept_under: the SHA-256 of the bundle that what is kept belongs to.
        """
        asked = trained_parts(task)
        rows = {} if sub is None else {ROWS: rows_to_bytes(sub.rows)}
        encodings = {name: find_encoding(encoding) for name, encoding in asked.items()}
        asked.pop(ROWS, None)
        sent = encode_parts(asked, outcome.parts, task.seed, tied, task.clip, task.local_noise)
        sent_parts = {name: (rows | sent.contents)[name] for name in encodings}
        hyper = check_hyper(_of_step(task, manifest), manifest.hyper)
        own_tied = tied_as_sent(task, asked, hyper, outcome, sent.contents, manifest)
        result, keeps_tied = outcome.result, bool(ALGORITHMS[task.algorithm].tied)
        if result.epochs >= 1 or result.evaluation is not None:
            self.counted = result.examples
        self._note_examples(result.examples, data.examples)
        report = Report(
            task=task.task,
            round=task.round,
            parts=tuple(
                encodings[name].part(name, content) for name, content in sent_parts.items()
            ),
            examples=result.examples,
            steps=result.steps,
            epochs=result.epochs,
            complete=result.complete,
            loss=result.loss,
            metrics=result.metrics,
            seconds=result.seconds,
            evaluation=result.evaluation,
            personal=outcome.personal_evaluation,
            lost_tied=keeps_tied and task.kept is not None and not tied,
            clipped=sent.clipped,
        )
        self.own_report = report
        if _withholds(task):
            report = withheld(report, task)
        contents, later = tuple(sent_parts.values()), None
        if task.secure is not None:
            report, contents, later = self._masked(task, report, contents[0], result.examples)
        encode(report)  # raises here what the coordinator would refuse
        kept_by_device = result.kept_state, {**own_tied, **sent.tied}, outcome.personal
        return FinishedUpdate(report, contents, kept_under, *kept_by_device, later)

    def _masked(
        self, task: Task, report: Report, content: memoryview, examples: int
    ) -> tuple[Report, tuple[memoryview, ...], UnmaskedUpdate | None]:
        """Return what is saved of a masked task: its report, the bytes of the report's part, and
        what is known of the update where it is masked later.

        report: what may be told. content: the clipped update as float32. examples: the device's.
        """
        share = share_of_task(task, examples)
        if task.secure is not None and task.secure.least_factor is not None:
            later = unmasked_update(task, report, content, share)
            return later.report, (content,), later
        update = FLOAT32.decode(content)
        words = words_of_update(task, update, share, 1.0)
        made = masked_report(task, report, words, self._directory, self._sessions)
        return made.report, (made.content,), None

    def _offer(
        self, task: Task | Question, bundle: Bundle, runtime: Runtime, held_out: Data | None
    ) -> None:
        """Take the task's model into use for predictions, if it is better. Leaves another model in
        the runtime. Raises StoppedError."""
        if self._newest is None:
            return
        reference = task.vector(MODEL)
        measure = partial(self._mean_loss, bundle, runtime, held_out)
        self._newest.offer(bundle, reference, self._contents.vector(reference.sha256), measure)

    def _mean_loss(
        self, bundle: Bundle, runtime: Runtime, held_out: Data | None, model: Vector
    ) -> float | None:
        """Return the mean loss on what is held out of a shared model, with the device's own
        parameters; infinity where it is not finite, None where nothing is held out."""
        if held_out is None:
            return None
        if model.size != bundle.manifest.size and self._chosen is not None:
            model = self._chosen[1].of(model)
        load_model(runtime, bundle, model, self._kept_state(bundle))
        try:
            found = evaluate_data(runtime, held_out, should_stop=self.halt.is_set)
        except DivergedError:
            return inf
        return found.loss_sum / found.examples

    def _read_vector(self, reference: VectorReference, sub: SubModel | None = None) -> Vector:
        """Return a vector, or the sub-model's part of it. Raises ProtocolError on a vector that is
        not finite, StoppedError."""
        pieces: bytes | bytearray | None = None
        try:
            if sub is not None:
                pieces = self._contents.selected_vector(reference.sha256)
            content = self._contents.vector(reference.sha256) if pieces is None else pieces
        except FileNotFoundError:
            if self.halt.is_set():  # the task was cancelled, and the next one's model replaced its
                raise StoppedError("the task was cancelled before training began") from None
            raise
        encoding = find_encoding(reference.encoding)
        encoding.check(content)
        vector = encoding.decode(content)
        return vector if sub is None or pieces is not None else sub.of(vector)

    def _kept_state(self, bundle: Bundle) -> Vector | None:
        return self._kept_states.load(bundle.sha256, kept_state_size(bundle.manifest))

    @contextmanager
    def _bundle_rechecked(self, sha256: str) -> Iterator[None]:
        """Where the bundle cannot be used in this block, close it, and check its files before it is
        used again."""
        try:
            yield
        except BundleError:
            self._opened = None
            self._contents.recheck_bundle(sha256)
            raise

    def _open(
        self, task: Task | Question, model: Vector, sub: SubModel | None = None
    ) -> tuple[Bundle, Runtime]:
        """Return the task's bundle and its runtime: the open one, if it is of the same bundle, and
        of a model as large. Of a sub-model the bundle has the sub-model's manifest."""
        opened = self._opened
        if (
            opened is not None
            and opened[0].sha256 == task.bundle
            and opened[0].manifest.size == model.size
        ):
            self._limit_memory(task, opened[0])
            return opened
        self._opened = None  # two models at a time may be more than the memory holds
        assert task.bundle is not None
        path = self._contents.bundle_path(task.bundle)
        bundle = open_bundle(path, files=() if sub is None else (TRAIN, EVAL))
        if sub is not None:
            bundle = bundle._replace(manifest=sub.manifest)
        self._open_features(bundle)
        self._limit_memory(task, bundle)
        runtime = open_runtime(
            path if sub is None else bundle,
            self.kind,
            self._threads,
            provider=self._provider,
            model=model,
            from_features=self.features is not None,
        )
        self._opened = bundle, runtime
        return self._opened

    def check_fits(self, task: Task | Question) -> None:
        """Raise MemoryError where a task is known to need more memory than may be used, and
        UnsupportedError where its update cannot be masked: before its model is fetched."""
        if isinstance(task, Task):
            check_helper(task)
            if task.secure is not None and task.secure.mode == "pairwise":
                self._sessions.check(task)
        if self._ceiling is None or task.bundle is None:
            return
        opened = self._opened is not None and self._opened[0].sha256 == task.bundle
        elements = max((vector.size // 4 for vector in task.vectors), default=0)
        if isinstance(task, Task) and ROWS in task.parts:
            elements = 0  # how many rows the data name is known once the bundle is here
        # How many sums a bundle has is known once it is here.
        beside = 0 if task_computes(task) else masked_memory(task, elements)
        self._ceiling.check_task(task.bundle, _batch_size(task), 0 if opened else elements, beside)

    def _limit_memory(self, task: Task | Question, bundle: Bundle) -> None:
        """Begin to hold the task to the memory that may be used. Raises MemoryError where it is
        known to need more."""
        ceiling, manifest = self._ceiling, bundle.manifest
        if ceiling is None:
            return
        batch_size = _batch_size(task)
        names = needed_files(manifest, self.kind, self.features is not None)
        graphs = sum(manifest.file(name).size for name in names)
        opened = self._opened is not None  # its vectors and graphs are in memory already
        ceiling.check_task(
            bundle.sha256,
            batch_size,
            0 if opened else manifest.local_size,
            (0 if opened else graphs)
            + masked_memory(task, manifest.elements_of(SUMS if task_computes(task) else UPDATE)),
        )
        self._check_memory = partial(ceiling.check_step, bundle.sha256, batch_size)

    def _open_features(self, bundle: Bundle) -> None:
        """Set ``features`` for this bundle. Those of another bundle are kept if they are the
        same."""
        if not (self.from_features and bundle.manifest.computed_features):
            self.features = None
        elif self.features is not None and graphs_of(self.features.bundle) == graphs_of(bundle):
            self.features.bundle = bundle
        else:
            self.features = FeatureCache(bundle, self._threads, self._feature_cache, self._provider)

    def task_data(self, bundle: Bundle, rows: tuple[int, int] | None = None) -> TaskData:
        """Return the data as they are now, prepared as the bundle says, and what is held out of the
        training; as features, where training is from features. ``rows``: only the examples that
        are made of these. Raises DataError."""
        data = self._data.of(bundle.manifest, rows)
        if self.features is None:
            return data
        assert isinstance(data.training, ArrayData)
        training = self.features.of(data.training)
        if data.held_out is None:
            return data._replace(training=training)
        assert isinstance(data.held_out, ArrayData)
        return TaskData(training, self.features.of(data.held_out), data.rows)

    def _fingerprint(self, data: Data) -> int:
        """Return what tells whether the places of the data have the examples that they had; 0 where
        no checkpoint is made, or the user makes the batches, whose order is the user's."""
        if self._checkpoint_every and isinstance(data, ArrayData | FeatureData):
            return data.fingerprint()
        return 0

    def _is_of(self, found: Checkpoint, data: Data) -> bool:
        """Return whether the checkpoint's training was on these data."""
        return (found.examples, found.fingerprint) == (data.examples, self._fingerprint(data))

    def _note_examples(self, passed: int, stated: int) -> None:
        """Warn where passes gave another number of examples than the data are said to have. What
        the passes gave is the device's weight."""
        if passed != stated and (passed, stated) != self._noted:
            log.warning(
                "a pass over the data gave %d examples, and examples=%d was given: %d is this "
                "device's weight",
                passed,
                stated,
                passed,
            )
            self._noted = passed, stated

    def _must_stop(self) -> bool:
        return self.halt.is_set() or (self.enough.is_set() and not self.steps)

    def _count(self, steps: int, loss: float) -> None:
        self.steps = steps
        self._count_batch()

    def _count_batch(self) -> None:
        self.batches += 1
        self._check_memory()
        rest = 0.0 if self._pacing is None else self._pacing.after_step()
        # A task that is stopped meanwhile ends at once.
        while rest > 0 and not (self.enough.is_set() or self.halt.wait(min(rest, REST))):
            rest -= REST


def _batch_size(task: Task | Question) -> int:
    return task.batch_size if isinstance(task, Task) else EVALUATION_BATCH


def _of_step(task: Task, manifest: Manifest) -> dict[str, float]:
    return of_step(task.algorithm, task.hyper, [each.name for each in manifest.hyper])


def _withholds(task: Task) -> bool:
    """Return whether the device tells nothing of the task that depends on its data."""
    return task.local_noise is not None or task.secure is not None


def task_computes(task: Task | Question) -> bool:
    """Return whether the task is of a computation, which trains nothing."""
    return isinstance(task, Task) and task.algorithm in KIND_NAMES


def _room(task: Task, manifest: Manifest) -> tuple[int, int]:
    """Return (bytes of the update, bytes of it before it is masked, if it waits for that)."""
    if task.secure is not None and not task_computes(task):
        return room_for(task, manifest.elements_of(UPDATE))
    parts = [(part, find_encoding(encoding)) for part, encoding in task.parts.items()]
    return sum(encoding.size(manifest.elements_of(part)) for part, encoding in parts), 0


def task_fingerprint(task: Task) -> str:
    """Return what decides the task's training, as a hash: without what another assignment of the
    same task may have otherwise (its time, what its vectors may come as, and what becomes of the
    update afterwards)."""
    vectors = tuple(msgspec.structs.replace(vector, delta=None) for vector in task.vectors)
    plain = msgspec.structs.replace(
        task,
        deadline=0.0,
        time_budget=None,
        vectors=vectors,
        clip=None,
        local_noise=None,
        privacy=None,
        secure=None,
        parts=trained_parts(task),
    )
    return digest(encode(plain).encode())


def _warn_of_checkpoint(task: Task, what: str) -> None:
    log.warning(
        "task %s: the checkpoint of its training is of %s; the training begins again",
        task.task,
        what,
    )


ANSWERS: dict[str, Callable[[Trainer, Question, float], msgspec.Struct]] = {
    EVALUATION: Trainer.evaluate,
    QUALITY: Trainer.look_at_data,
    PAIRWISE: Trainer.agree_on_masks,
    FIT: Trainer.fit,
}
"""Kind of question -> the function that works out the reply's content, in at most this many
seconds. Where that takes long, the function looks at ``Trainer.halt`` meanwhile."""
