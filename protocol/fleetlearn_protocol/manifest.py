"""manifest.json: what a training bundle is. Its SHA-256 names the bundle; it holds the SHA-256 of
every other file.

Names inside the graphs (all float32 unless the manifest says otherwise; the first axis of a batch
is dynamic):

train.onnx   inputs  ``param.NAME``, ``state.NAME``, ``batch.NAME``, ``hyper.NAME``, and for each of
                     the manifest's references ``anchor.NAME``, ``correction.NAME``,
                     ``previous.NAME``, of the parameters that travel; ``seed`` (int64, a scalar
                     from 0) where the step is random
             outputs ``next.param.NAME``, ``next.state.NAME``, ``loss``, ``metric.NAME`` (means over
             the batch)
train_many.onnx
                     the same names, with a leading axis of devices, and one of steps in the batch;
                     see ``TrainMany``
eval.onnx    inputs  ``param.NAME``, ``batch.NAME``
             outputs ``loss_sum``, ``metric_sum.NAME``, ``examples`` (int64); scalars
infer.onnx   the user's input names to ``output`` names, parameters as initializers
features.onnx  inputs  ``batch.NAME``
             outputs ``batch.NAME`` of the manifest's ``features`` that are not arrays of the batch
train_from_features.onnx, eval_from_features.onnx
                     the same as train.onnx and eval.onnx, with the manifest's ``features`` as their
                     batch
activations.onnx  a bottom's forward pass in training mode
             inputs  ``param.NAME``, ``batch.NAME`` except ``batch.gradient``, ``seed`` where the
                     step is random
             outputs ``activations``
top_step.onnx  the same as train.onnx, and for each party the output ``gradient.NAME``, NAME being
             its array of the batch: the gradient of each row's own loss

Large constants of all graphs except infer.onnx, such as frozen parameters, may be in
graphs/frozen.safetensors, to which the graphs refer as ONNX's external data. infer.onnx holds all
of its own.

ONNX graphs are in single-assignment form: an output cannot have its input's name, so it is called
``next.``.
"""

from __future__ import annotations

from math import prod
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from fleetlearn_protocol.computations.settings import ComputationSettings
from fleetlearn_protocol.errors import BundleError, Code
from fleetlearn_protocol.messages import (
    BUFFERS,
    MAX_EXACT,
    ROW_ELEMENTS,
    ROWS,
    SUMS,
    Digest,
    Name,
    Number,
)
from fleetlearn_protocol.preprocessing import Preprocessing

FORMAT = "fleetlearn.bundle"
FORMAT_VERSION = 1
"""The version of a bundle whose graphs hold all of their constants."""
FROZEN_VERSION = 2
"""The version of a bundle that has graphs/frozen.safetensors, which readers of version 1 do not
know."""
PREPROCESSING_VERSION = 3
"""The version of a bundle that has preprocessing. Readers of version 2 would train on raw data."""
COMPUTATION_VERSION = 4
"""The version of a bundle that has a computation in place of graphs. Readers of version 3 would
look for graphs."""
SPLIT_VERSION = 5
"""The version of a bundle that is one part of a split model. Readers of earlier versions would
train the part as if it were a model."""
PUBLIC_VERSION = 6
"""The version of a bundle that has public examples in place of graphs."""
VERSIONS = (
    FORMAT_VERSION,
    FROZEN_VERSION,
    PREPROCESSING_VERSION,
    COMPUTATION_VERSION,
    SPLIT_VERSION,
    PUBLIC_VERSION,
)
MAX_MANIFEST_BYTES = 16 * 2**20
"""Largest manifest.json, in bytes."""
MANIFEST = "manifest.json"
TRAIN, EVAL, INFER = "graphs/train.onnx", "graphs/eval.onnx", "graphs/infer.onnx"
TRAIN_MANY = "graphs/train_many.onnx"
FEATURES = "graphs/features.onnx"
TRAIN_FROM_FEATURES, EVAL_FROM_FEATURES = (
    "graphs/train_from_features.onnx",
    "graphs/eval_from_features.onnx",
)
OF_FEATURES = (FEATURES, TRAIN_FROM_FEATURES, EVAL_FROM_FEATURES)
"""The files of a bundle whose features a device may compute once for each example, and keep."""
ACTIVATIONS, TOP_STEP = "graphs/activations.onnx", "graphs/top_step.onnx"
"""What a split model's bottom and top have beside the graphs of any bundle."""
GRADIENT = "gradient"
"""The last array of a bottom's batch: what comes back for the activations."""
FROZEN = "graphs/frozen.safetensors"
"""The graphs' large constants. Bundles of the same frozen model have the same file: a device
fetches it once."""
PARAMETERS, STATE = "parameters.safetensors", "state.safetensors"
PERSONAL = "personal.safetensors"
"""The personal parameters alone, of a bundle with sparse tables: a device need not fetch
parameters.safetensors for them."""
PUBLIC = "public.safetensors"
"""The public examples: one tensor for each array of the batch."""
ORT_TRAINING = ("training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "checkpoint")
"""The files below ``ort_training/``."""

TensorName = Annotated[str, Meta(min_length=1, max_length=256)]
FilePath = Annotated[str, Meta(max_length=200)]
MAX_ELEMENTS = 2**31
"""Most elements of a parameter vector."""
Size = Annotated[int, Meta(ge=1, le=MAX_ELEMENTS)]
Shape = Annotated[tuple[Size, ...], Meta(max_length=32)]
Version = Annotated[int, Meta(ge=0, le=1000)]
Bytes = Annotated[int, Meta(ge=0, le=2**43)]


class Parameter(msgspec.Struct, frozen=True):
    """One row of the parameter table: a tensor of the model."""

    name: TensorName
    """As in ``param.NAME`` and in parameters.safetensors."""
    shape: Shape
    """Sizes of the axes; empty for a scalar."""
    offset: Annotated[int, Meta(ge=0, le=MAX_ELEMENTS)]
    """Place of its first element in the flat vector, in elements."""
    buffer: bool = False
    """Takes no gradient (BatchNorm's running statistics). Its values travel as they are (section 4
    of PROTOCOL.md)."""
    personal: bool = False
    """Never leaves the device: not a part of what travels. Personal rows are the table's last."""
    infer_offset: Bytes | None = None
    """Where its raw bytes begin in infer.onnx, so that a trained model is written by replacing
    bytes in place."""


class Input(msgspec.Struct, frozen=True, omit_defaults=True):
    """One array of a batch, or of the model's outputs; the first axis is the examples' and is not
    in ``shape``."""

    name: TensorName
    """As in ``batch.NAME``, or infer.onnx's name of the output."""
    dtype: Literal["float32", "float64", "int64", "int32", "uint8", "bool"]
    """Type of its elements."""
    shape: Shape
    """Shape of one example."""
    below: Annotated[int, Meta(ge=1, le=MAX_EXACT)] | None = None
    """Where the integers name classes, or rows of a table: how many there are. The integers are 0
    to ``below`` - 1."""
    ignored: Annotated[int, Meta(ge=-MAX_EXACT, le=MAX_EXACT)] | None = None
    """One more integer that is allowed: the loss leaves out examples of this class."""


class Hyper(msgspec.Struct, frozen=True):
    """A scalar float32 input of the step; without a default the plan must give it."""

    name: Name
    """As in ``hyper.NAME``."""
    default: Number | None = None
    """Its value where the plan gives none."""


class State(msgspec.Struct, frozen=True):
    """One row of the state table: a float32 tensor that the step hands to the next step, on the
    same device."""

    name: TensorName
    """As in ``state.NAME``; ``SLOT.PARAMETER`` for a slot of an optimizer."""
    shape: Shape
    """Sizes of the axes; empty for a scalar."""
    offset: Annotated[int, Meta(ge=0, le=MAX_ELEMENTS)]
    """Place of its first element in the flat state vector, in elements."""
    kept: bool = False
    """Whether it outlives a task. Otherwise each task begins with its initial value."""


class LocalStep(msgspec.Struct, frozen=True):
    """The update rule compiled into train.onnx: w <- optimizer(w, clipped(g + mu * (w - anchor)) +
    correction)."""

    optimizer: Literal["sgd", "momentum", "nesterov", "adam", "adamw", "custom"] = "sgd"
    """The optimizer's name; ``custom`` is a step that the user wrote."""
    proximal: bool = False
    """Whether mu * (w - anchor) is added to the gradient: the penalty mu/2 * ||w - anchor||^2
    (FedProx, Ditto)."""
    correction: bool = False
    """Whether ``correction`` is added to the gradient (SCAFFOLD's c - c_k)."""
    contrastive: bool = False
    """Whether mu times MOON's contrastive loss is added to the loss."""
    clip: bool = False
    """Whether the gradient is scaled down to the norm ``max_norm`` where it is longer."""
    weight_decay: bool = False
    """Whether ``weight_decay`` * w is added to the gradient; with adamw the decay is decoupled from
    it."""


Reference = Literal["anchor", "correction", "previous"]
"""A vector like the model's, P elements, that the step reads: the round's model; SCAFFOLD's c -
c_k; the model with which the device's last task of this bundle ended, and before that the
round's."""
REFERENCES_READ: dict[str, tuple[Reference, ...]] = {
    "proximal": ("anchor",),
    "correction": ("correction",),
    "contrastive": ("anchor", "previous"),
}
"""Switch of the step -> the references that it reads."""


class TrainMany(msgspec.Struct, frozen=True):
    """train_many.onnx: several steps of many devices in one call.

    Parameters, state and ``seed`` have a leading axis of ``devices``; batch arrays are (devices,
    steps, n, ...). References and hyper-parameters are as in train.onnx, one for all devices,
    except ``previous`` and ``correction``, which have the axis too. ``steps`` (int64, shape
    (devices,)) says how many steps each device does; the steps after these change nothing.
    ``hyper.lr`` may be (devices, steps). Outputs
    ``next.param.NAME`` and ``next.state.NAME`` have the axis; ``loss`` and ``metric.NAME`` are
    (devices, steps), 0 for steps that were not done.
    """

    devices: Annotated[int, Meta(ge=1, le=2**20)]
    """Devices in a call; a smaller block is filled up with devices that do 0 steps."""
    steps: Annotated[int, Meta(ge=1, le=10_000)]
    """Most steps in a call."""
    batch: Annotated[int, Meta(ge=1, le=2**20)] | None = None
    """Examples in each step; None: any number, in a call the same for all."""
    lr_by_step: bool | msgspec.UnsetType = msgspec.UNSET
    """Whether ``hyper.lr`` is (devices, steps), a value for each step of each device. Absent: it is
    not."""


class Cut(msgspec.Struct, frozen=True):
    """Where one party's bottom meets the top of a split model."""

    party: Name
    """The party's name in the run."""
    activations: Input
    """What the bottom makes of an example, float32. The top's array has the same name."""
    bundle: Digest | msgspec.UnsetType = msgspec.UNSET
    """SHA-256 of the bottom's manifest.json: the bundle that this top was exported with. Tops have
    it."""


class SplitPart(msgspec.Struct, frozen=True):
    """Which part of a split model a bundle is (Vepakomma, Gupta, Swedish, Raskar 2018, "Split
    learning for health", arXiv 1812.00564).

    A bottom's batch is its party's arrays, then ``gradient``: float32, as the activations. Its step
    takes the gradient of each row's own loss with respect to that row's activations, and divides by
    the number of rows, as the mean loss does. A top's batch is the parties' activations, then the
    loss's targets.
    """

    part: Literal["bottom", "top"]
    """Below the cut, or above it."""
    cuts: Annotated[tuple[Cut, ...], Meta(min_length=1, max_length=32)]
    """A bottom's own cut; a top's cuts, in the order of its batch."""


class PublicExamples(msgspec.Struct, frozen=True):
    """Examples without labels that all devices have, and whose class scores they tell each other
    (Li and Wang 2019, "FedMD", arXiv 1910.03581). Each device trains a model of its own.

    What travels are the scores (logits) of all examples, float32, shape (examples, classes), the
    only row of the parameter table. public.safetensors has the arrays of the batch.
    """

    examples: Size
    """N, how many there are."""
    classes: Size
    """C, the scores of an example."""


class SparseRows(msgspec.Struct, frozen=True):
    """Tables of which a device needs the rows that its data name, such as an embedding of items.

    Such a device trains a sub-model: each table without all other rows, and its integers numbered
    anew (section "Rows of tables" of PROTOCOL.md). train.onnx and eval.onnx take tables of any
    number of rows.
    """

    tables: Annotated[tuple[TensorName, ...], Meta(min_length=1, max_length=1000)]
    """Names of the parameters whose first axis has these rows."""
    arrays: Annotated[tuple[TensorName, ...], Meta(min_length=1, max_length=64)]
    """Names of the arrays of the batch whose integers are numbers of rows."""
    rows: Size
    """How many rows each table has."""


class File(msgspec.Struct, frozen=True):
    """What a file of the bundle must be."""

    sha256: Digest
    """SHA-256 of the file's bytes."""
    size: Bytes
    """Size in bytes."""


class Manifest(msgspec.Struct, frozen=True):
    """The bundle's table of contents."""

    format: str
    """`fleetlearn.bundle`."""
    version: int
    """1; 2 if the bundle has graphs/frozen.safetensors; 3 if it has preprocessing; 4 if it has a
    computation; 5 if it is one part of a split model; 6 if it has public examples."""
    name: Annotated[str, Meta(min_length=1, max_length=100)]
    """The model's name, for people."""
    parameters: Annotated[tuple[Parameter, ...], Meta(min_length=1, max_length=100_000)]
    """The parameter table, in the order of the flat vector, without gaps."""
    batch: Annotated[tuple[Input, ...], Meta(min_length=1, max_length=64)]
    """The arrays of a batch, in the order of the user's data."""
    outputs: Annotated[tuple[Input, ...], Meta(max_length=64)]
    """The outputs of infer.onnx; a bundle with a computation has none."""
    hyper: Annotated[tuple[Hyper, ...], Meta(max_length=64)]
    """The scalar inputs of the step."""
    step: LocalStep
    """The update rule."""
    metrics: Annotated[tuple[Name, ...], Meta(max_length=64)]
    """What train.onnx and eval.onnx measure beside the loss."""
    files: Annotated[dict[FilePath, File], Meta(max_length=64)]
    """Path below the bundle's folder -> hash and size."""
    state: Annotated[tuple[State, ...], Meta(max_length=100_000)] = ()
    """The state table, in the order of its flat vector, without gaps. Initial values are in
    state.safetensors; without that file they are 0."""
    references: Annotated[tuple[Reference, ...], Meta(max_length=3)] = ()
    """The vectors that train.onnx reads beside the model."""
    random: bool = False
    """Whether train.onnx draws random numbers (dropout), from the input ``seed``: another one for
    each step."""
    many: TrainMany | None = None
    """What graphs/train_many.onnx takes, where the bundle has one."""
    features: (
        Annotated[tuple[Input, ...], Meta(min_length=1, max_length=64)] | msgspec.UnsetType
    ) = msgspec.UNSET
    """The batch of train_from_features.onnx and eval_from_features.onnx, where the bundle has them:
    what features.onnx computes of each example alone, always the same, and arrays of the batch,
    which keep their names."""
    compute: Literal["float16"] | msgspec.UnsetType = msgspec.UNSET
    """The type that train.onnx's convolutions and matrix products take, where that is not float32.
    A runtime without kernels for it computes them in float32."""
    normalisation: (
        Annotated[tuple[TensorName, ...], Meta(min_length=1, max_length=100_000)]
        | msgspec.UnsetType
    ) = msgspec.UNSET
    """Names of the parameters that belong to normalisation layers, where the model has such layers:
    FedBN's."""
    preprocessing: Preprocessing | msgspec.UnsetType = msgspec.UNSET
    """How the arrays of the batch are made from raw data, where the bundle says that."""
    computation: ComputationSettings | msgspec.UnsetType = msgspec.UNSET
    """What devices compute of their rows, where the bundle has that in place of graphs (section
    "Computations" of PROTOCOL.md). Its parameters are the computation's state."""
    sums: Annotated[int, Meta(ge=1, le=2**28)] | msgspec.UnsetType = msgspec.UNSET
    """S, the whole numbers that a device adds up, where the bundle has a computation."""
    split: SplitPart | msgspec.UnsetType = msgspec.UNSET
    """Which part of a split model the bundle is, where it is one."""
    public: PublicExamples | msgspec.UnsetType = msgspec.UNSET
    """The examples whose class scores travel, where the bundle has them in place of graphs."""
    sparse: SparseRows | msgspec.UnsetType = msgspec.UNSET
    """The tables of which a device needs some rows alone, where the model has such tables."""
    opset: Version = 0
    """Version of the ONNX operators in the graphs."""
    ir_version: Version = 0
    """Version of the ONNX file format."""
    made_by: Annotated[str, Meta(max_length=200)] = ""
    """The exporter and its version, for people."""

    @property
    def has_graphs(self) -> bool:
        """Whether it is a model's: there is neither a computation nor public examples."""
        return self.computation is msgspec.UNSET and self.public is msgspec.UNSET

    @property
    def size(self) -> int:
        """P, the elements of the flat vector that travels."""
        return sum(prod(parameter.shape) for parameter in self.parameters if not parameter.personal)

    @property
    def local_size(self) -> int:
        """Elements of the flat vector on a device: what travels, then the personal parameters."""
        return sum(prod(parameter.shape) for parameter in self.parameters)

    @property
    def state_size(self) -> int:
        """Elements of the flat state vector."""
        return sum(prod(slot.shape) for slot in self.state)

    @property
    def travelling(self) -> tuple[Parameter, ...]:
        """The table's rows that travel."""
        return tuple(parameter for parameter in self.parameters if not parameter.personal)

    @property
    def buffers(self) -> tuple[slice, ...]:
        """The places, in the flat vector, of the rows that travel and take no gradient."""
        return tuple(
            slice(parameter.offset, parameter.offset + prod(parameter.shape))
            for parameter in self.travelling
            if parameter.buffer
        )

    @property
    def row_elements(self) -> int:
        """How many elements belong to one row of the sparse tables, of all of them together; 0
        where there are none."""
        tables = () if self.sparse is msgspec.UNSET else self.sparse.tables
        return sum(prod(row.shape[1:]) for row in self.parameters if row.name in tables)

    @property
    def data_arrays(self) -> tuple[Input, ...]:
        """The arrays of the batch that come from data: all except a bottom's gradient."""
        is_bottom = self.split is not msgspec.UNSET and self.split.part == "bottom"
        return self.batch[:-1] if is_bottom else self.batch

    def elements_of(self, part: str) -> int:
        """Return how many elements a part of a report has: whole numbers of ``sums`` and ``rows``,
        at most, else float32. ``ROW_ELEMENTS`` is no part: how many each row has."""
        if part == SUMS:
            return self.sums or 0
        if part == ROWS:
            return 0 if self.sparse is msgspec.UNSET else self.sparse.rows
        if part == ROW_ELEMENTS:
            return self.row_elements
        return (
            sum(elements.stop - elements.start for elements in self.buffers)
            if part == BUFFERS
            else self.size
        )

    @property
    def computed_features(self) -> tuple[Input, ...]:
        """The outputs of features.onnx; empty if the bundle has none."""
        names = {array.name for array in self.batch}
        return (
            ()
            if self.features is msgspec.UNSET
            else tuple(feature for feature in self.features if feature.name not in names)
        )

    def with_features_as_batch(self) -> Manifest:
        """Return the manifest as train_from_features.onnx and eval_from_features.onnx have it.

        Raises BundleError if the bundle has no features.
        """
        if self.features is msgspec.UNSET:
            raise BundleError(
                Code.UNKNOWN_CONTENT,
                f"bundle {self.name} has no features, so nothing trains from them",
            )
        return msgspec.structs.replace(self, batch=self.features)

    @property
    def has_ort_training(self) -> bool:
        return f"ort_training/{ORT_TRAINING[0]}" in self.files

    def file(self, path: str) -> File:
        """Return the entry of a file. Raises BundleError if the bundle has no such file."""
        if path not in self.files:
            raise BundleError(
                Code.UNKNOWN_CONTENT,
                f"bundle {self.name} has no {path}; it has {sorted(self.files)}",
            )
        return self.files[path]
