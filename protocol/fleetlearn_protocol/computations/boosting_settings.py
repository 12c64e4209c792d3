"""What a bundle says of boosting: the structs of the kinds ``boosted-trees`` and
``boosted-components``."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from fleetlearn_protocol.messages import MAX_EXACT, Number

Share = Annotated[float, Meta(gt=0, le=1)]
Positive = Annotated[float, Meta(gt=0, le=1e6)]
NotNegative = Annotated[float, Meta(ge=0, le=1e6)]
MAX_SUMS = 2**24
"""Most sums of a round, 8 bytes each."""


MOST_END = 1e37
"""The greatest number at which a range may end: the edges between are float32."""


class BoostColumn(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A column of x. NaN is a missing value."""

    name: Annotated[str, Meta(min_length=1, max_length=200)]
    """For people: results name it."""
    categories: (
        Annotated[int, Meta(ge=0, le=4096)]
        | Annotated[tuple[str, ...], Meta(min_length=1, max_length=4096)]
    ) = 0
    """0: a column of numbers. A number: its values are codes, 0 to categories - 1. Texts: it is one
    of these, and its code the place. Whatever else stands there is no category that is known."""

    range: tuple[Number, Number] | None = None
    """Of a column of numbers, for trees: between the least and the greatest value that everybody
    may know ``bins`` bins are equally wide, and nothing is asked of the values. All columns of
    numbers have one, or none has. null: the edges of equally full bins are found."""

    @property
    def codes(self) -> int:
        """How many categories there are; 0: it is a column of numbers."""
        return self.categories if isinstance(self.categories, int) else len(self.categories)


BoostColumns = Annotated[tuple[BoostColumn, ...], Meta(min_length=1, max_length=10_000)]
Label = Annotated[str, Meta(max_length=200)]
LabelValues = Annotated[tuple[str, ...], Meta(max_length=1000)]


class BoostedTrees(
    msgspec.Struct,
    frozen=True,
    tag="boosted-trees",
    tag_field="kind",
    forbid_unknown_fields=True,
    omit_defaults=True,
):
    """Gradient boosting of trees over histograms."""

    columns: BoostColumns
    """The columns of x, in order."""
    loss: Literal["squared", "logistic", "softmax"] = "squared"
    """squared: y is a number. logistic: y is 0 or 1. softmax: y is a class."""
    classes: Annotated[int, Meta(ge=0, le=1000)] = 0
    """Of softmax: how many there are. 0 with the other losses."""
    rounds: Annotated[int, Meta(ge=1, le=10_000)] = 100
    """Most boosting rounds. A round grows one tree; with softmax one for each class."""
    depth: Annotated[int, Meta(ge=1, le=12)] = 5
    """Most splits on the way to a leaf."""
    bins: Annotated[int, Meta(ge=2, le=1024)] = 64
    """Most bins of a column of numbers, without the one of missing values."""
    learning_rate: Share = 0.1
    """What a leaf's value is multiplied by."""
    l2: NotNegative = 1.0
    """lambda, added to the sum of a leaf's second derivatives."""
    min_gain: NotNegative = 0.0
    """gamma: a split must gain more than this."""
    min_child_weight: NotNegative = 1.0
    """Least sum of second derivatives on each side of a split; with squared loss the rows."""
    row_share: Share = 1.0
    """Share of the rows that each boosting round looks at."""
    column_share: Share = 1.0
    """Share of the columns that each boosting round may split."""
    held_out: Annotated[float, Meta(ge=0, le=0.9)] = 0.0
    """Share of the rows that no tree is grown from. 0: there are none."""
    patience: Annotated[int, Meta(ge=1, le=10_000)] = 10
    """With held-out rows: training ends once their loss has not fallen for this number of rounds,
    and the rounds since then are forgotten."""
    seed: Annotated[int, Meta(ge=0, le=MAX_EXACT)] = 0
    """Draws rows and columns."""
    label: Label = ""
    """The column of y, where devices' data are tables whose columns have the names of ``columns``
    and this one. Empty: their data are the arrays x, (n, columns), and y."""
    label_values: LabelValues = ()
    """The texts that stand for the classes 0, 1, ... in the label's column. Empty: these numbers
    do."""

    @property
    def has_ranges(self) -> bool:
        """Whether the edges of bins follow from the ranges of columns."""
        return any(column.range is not None for column in self.columns)

    @property
    def y_classes(self) -> int:
        """How many classes y has; 0: it is a number."""
        return {"squared": 0, "logistic": 2, "softmax": self.classes}[self.loss]

    @property
    def outputs(self) -> int:
        """K: how many scores a row has, and trees a round."""
        return self.classes if self.loss == "softmax" else 1

    @property
    def contradiction(self) -> str | None:
        """What of it cannot be; None: nothing."""
        if (self.loss == "softmax") != (self.classes > 0) or self.classes == 1:
            return (
                f"loss is {self.loss!r} and classes {self.classes}; softmax takes 2 or more "
                "classes, and the other losses take 0"
            )
        if (problem := _wrong_ranges(self.columns)) is not None:
            return problem
        return wrong_columns(self.columns, self.label, self.label_values, self.y_classes)


class BoostedComponents(
    msgspec.Struct,
    frozen=True,
    tag="boosted-components",
    tag_field="kind",
    forbid_unknown_fields=True,
    omit_defaults=True,
):
    """Component-wise gradient boosting: each iteration adds a little of the one base learner, of
    one column, that fits the gradient best."""

    columns: BoostColumns
    """The columns of x, in order. A column of categories has one base learner, with a ridge
    penalty."""
    loss: Literal["squared", "logistic"] = "squared"
    """squared: y is a number. logistic: y is 0 or 1."""
    learners: Annotated[
        tuple[Literal["linear", "spline"], ...], Meta(min_length=1, max_length=2)
    ] = ("linear", "spline")
    """The base learners of each column of numbers. spline alone: a P-spline, which can be a
    straight line too. Both: the line, and a P-spline without a straight line in it, so that the
    result says which columns need more than a line."""
    iterations: Annotated[int, Meta(ge=1, le=100_000)] = 200
    """How many times a base learner is added."""
    learning_rate: Share = 0.1
    """nu: what a base learner's coefficients are multiplied by."""
    knots: Annotated[int, Meta(ge=1, le=200)] = 20
    """Inner knots of a spline, evenly spaced over the range of the column."""
    degrees_of_freedom: Annotated[float, Meta(ge=1, le=100)] = 2.0
    """Of each spline and each category's base learner: trace(2 S - S S) of its hat matrix S. Fewer
    make splines smoother. A straight line has 2; with as many no kind of base learner is chosen
    because it can bend more. A spline alone, which contains the line, takes more than 2."""
    label: Label = ""
    """The column of y, where devices' data are tables whose columns have the names of ``columns``
    and this one. Empty: their data are the arrays x, (n, columns), and y."""
    label_values: LabelValues = ()
    """The texts that stand for the classes 0, 1, ... in the label's column. Empty: these numbers
    do."""

    @property
    def y_classes(self) -> int:
        """How many classes y has; 0: it is a number."""
        return 2 if self.loss == "logistic" else 0

    @property
    def centred(self) -> bool:
        """Whether splines have no straight line in them."""
        return "linear" in self.learners

    @property
    def contradiction(self) -> str | None:
        """What of it cannot be; None: nothing."""
        if ranged := [column.name for column in self.columns if column.range is not None]:
            return f"column {ranged[0]!r} has a range, which is for the bins of trees alone"
        if len({*self.learners}) < len(self.learners):
            return f"the base learner {self.learners[0]} is there twice"
        has_splines = "spline" in self.learners and any(not c.codes for c in self.columns)
        least, most = (0, self.knots + 2) if self.centred else (2, self.knots + 4)
        if has_splines and not least < self.degrees_of_freedom < most:
            return (
                f"degrees_of_freedom is {self.degrees_of_freedom:g}; splines with {self.knots} "
                f"inner knots and learners {list(self.learners)} take more than {least} and less "
                f"than {most}"
            )
        return wrong_columns(self.columns, self.label, self.label_values, self.y_classes)


def _wrong_ranges(columns: tuple[BoostColumn, ...]) -> str | None:
    """Return which range contradicts others; None: none does."""
    ranged = any(column.range is not None for column in columns)
    for column in columns:
        if column.range is None:
            if ranged and not column.codes:
                return f"column {column.name!r} has no range, and others have: give all one"
            continue
        low, high = column.range
        if column.codes:
            return f"column {column.name!r} has categories and a range; a range is of numbers"
        if not -MOST_END <= low < high <= MOST_END:
            return (
                f"column {column.name!r} has the range {low:g} to {high:g}; expected two different "
                f"numbers, the least first, of at most {MOST_END:g}"
            )
    return None


def wrong_columns(
    columns: tuple[BoostColumn, ...], label: str, label_values: tuple[str, ...], classes: int
) -> str | None:
    """Return what to say of names or texts that contradict each other; None: none do. classes: how
    many y has; 0: it is a number."""
    names = [label, *(column.name for column in columns)]
    if len({*names}) < len(names):
        return f"column {max(names, key=names.count)!r} is there twice"
    for column in columns:
        if isinstance(column.categories, tuple):
            if not label:
                return (
                    f"column {column.name!r} has texts as categories, and devices' data are arrays "
                    "of numbers: set label, so that they are tables"
                )
            if len({*column.categories}) < len(column.categories):
                return f"column {column.name!r} has a category twice"
    if label_values and (not label or len({*label_values}) != classes):
        return (
            f"label_values has {len({*label_values})} texts; expected one for each of the "
            f"{classes} classes of a column that label names"
        )
    return None
