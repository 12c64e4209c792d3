"""The tables of dropout.py, as docs/studies/dropout.md has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from typing import Any

import _measure as measure
import numpy as np
from fleetlearn_simulator.results.run_statistics import Target

Figures = Mapping[str, Any]
"""Of a run."""
Results = Mapping[Any, Sequence[Figures]]
"""The runs of each cell: (data, recipe, hazard, dropout, over-selection, deadline)."""
Show = Callable[[float], str]


def percent(value: float) -> str:
    return f"{100 * value:.0f}" if value >= 0.1 or value == 0 else f"{100 * value:.1f}"


def digits(value: float) -> str:
    return (
        f"{value:.0f}"
        if value >= 100 or value == round(value)
        else f"{value:.2g}"
        if value < 1
        else f"{value:.3g}"
    )


def minutes(seconds: float) -> str:
    return digits(float(f"{seconds / 60:.2g}"))


def hours(seconds: float) -> str:
    return digits(float(f"{seconds / 3600:.2g}"))


def ratio(value: float) -> str:
    return f"{value:.2g}"


def worst_tier(runs: Sequence[Figures]) -> str:
    """The accuracy of the final model for the tier for which it is worst."""
    return spread([min(run["tier_accuracy"].values()) for run in runs], percent)


def spread(values: Sequence[float | None], show: Show) -> str:
    """``median [least-greatest]`` over seeds. None stands for never, which is more than any number;
    if some runs never got there, how many did."""
    numbers = sorted(inf if value is None else value for value in values)
    there = sum(value < inf for value in numbers)
    middle = float(np.median(numbers))
    if not there:
        return "never"
    words = "never" if middle == inf else show(middle)
    least, greatest = show(numbers[0]), show(numbers[-1]) if numbers[-1] < inf else ""
    if there < len(numbers):
        return f"{words} [{least}-] ({there} of {len(numbers)})"
    return words if least == greatest else f"{words} [{least}-{greatest}]"


def of(runs: Sequence[Figures], *path: str, show: Show) -> str:
    """A figure of a cell's runs; of a table within them, by the names that lead to it."""

    def value(row: Any) -> Any:
        for name in path:
            row = None if row is None else row[name]
        return row

    return spread([value(run) for run in runs], show)


def text(
    results: Results,
    chosen: Mapping[str, Mapping[str, float]],
    rates: Mapping[float, float],
    fleet: Any,
    target: Target,
) -> str:
    """Return all tables. ``fleet``: the fates of many devices, each with its tier and its seconds
    of training."""
    parts = {
        "Chosen": tuned(chosen),
        "Dropout by tier": by_tier(results, rates, fleet),
        f"Until {target}": recipes(results),
        "What comes to nothing, and who is heard": course(results),
        "Accuracy in per cent on the devices' own digits": own(results),
        "Over-selection and deadlines": plans(results),
        "All devices as likely to vanish": equal(results),
    }
    if any(cell.recipe == "fednova" for cell in results):
        parts["Unequal work"] = unequal(results)
    return "\n\n".join(
        f"## {title}\n\n{measure.table(list(rows))}" for title, rows in parts.items()
    )


def _values(results: Results, field: str) -> list[Any]:
    return list(dict.fromkeys(getattr(cell, field) for cell in results))


def _usual(results: Results) -> Any:
    """The plan that the recipes are compared with."""
    return next(iter(results))


def tuned(chosen: Mapping[str, Mapping[str, float]]) -> Iterator[Sequence[str]]:
    yield "recipe", "chosen"
    for recipe, values in chosen.items():
        yield recipe, ", ".join(f"{key} = {value:g}" for key, value in values.items())


def by_tier(results: Results, rates: Mapping[float, float], fleet: Any) -> Iterator[Sequence[str]]:
    """Yield for each tier how long training takes, and the share of devices that would not finish
    it."""
    names = list(next(iter(results.values()))[0]["heard"])
    yield "tier", "share", "training, s", *(f"dropout {percent(share)} %" for share in rates)
    for number, name in enumerate(names):
        seconds = fleet.train[fleet.tier == number]
        low, middle, high = np.quantile(seconds, [0.05, 0.5, 0.95])
        lost = (f"{100 * np.mean(-np.expm1(-rate * seconds)):.0f} %" for rate in rates.values())
        yield (
            name,
            f"{np.mean(fleet.tier == number):.2f}",
            f"{middle:.0f} [{low:.0f}-{high:.0f}]",
            *lost,
        )
    low, middle, high = np.quantile(fleet.train, [0.05, 0.5, 0.95])
    yield (
        "all",
        "1",
        f"{middle:.0f} [{low:.0f}-{high:.0f}]",
        *(f"rate {rate:g}/s" for rate in rates.values()),
    )


def recipes(results: Results) -> Iterator[Sequence[str]]:
    """Rounds and virtual time to the target."""
    recipes_shown = _values(results, "recipe")
    yield (
        "data",
        "dropout",
        *(f"{recipe}: {what}" for what in ("rounds", "minutes") for recipe in recipes_shown),
    )
    for data in _values(results, "data"):
        for share in _values(results, "dropout"):
            runs = [
                results[_usual(results)._replace(data=data, recipe=recipe, dropout=share)]
                for recipe in recipes_shown
            ]
            rounds = [of(run, "to_target", "rounds", show=digits) for run in runs]
            yield (
                data,
                f"{percent(share)} %",
                *rounds,
                *(of(run, "to_target", "time", show=minutes) for run in runs),
            )


def own(results: Results) -> Iterator[Sequence[str]]:
    """The final models on the devices' own digits."""
    tiers = list(next(iter(results.values()))[0]["heard"])
    usual = _usual(results)
    yield "data", "recipe", "dropout", "all", *tiers, "worst tenth"
    for data in _values(results, "data"):
        for recipe in _values(results, "recipe"):
            for share in _values(results, "dropout"):
                runs = results[usual._replace(data=data, recipe=recipe, dropout=share)]
                each = (of(runs, "tier_accuracy", tier, show=percent) for tier in tiers)
                overall = of(runs, "accuracy", show=percent)
                yield (
                    data,
                    recipe,
                    f"{percent(share)} %",
                    overall,
                    *each,
                    of(runs, "worst_decile", show=percent),
                )


def course(results: Results) -> Iterator[Sequence[str]]:
    """Yield the course of a run with the usual plan. It is the same for all recipes and data,
    because which devices vanish does not depend on what is learned."""
    yield "", *(f"dropout {percent(share)} %" for share in _values(results, "dropout"))
    columns = [
        results[_usual(results)._replace(dropout=share)] for share in _values(results, "dropout")
    ]
    for title, path in (
        ("tasks lost, %", ["lost_share"]),
        ("device time wasted, %", ["wasted_share"]),
        ("bytes wasted, %", ["wasted_bytes_share"]),
        *((f"{tier}: tasks kept, %", ["kept", tier]) for tier in columns[0][0]["kept"]),
    ):
        yield title, *(of(runs, *path, show=percent) for runs in columns)
    for tier in columns[0][0]["heard"]:
        yield (
            f"{tier}: heard",
            *(of(runs, "heard", tier, show=lambda value: f"{value:.2f}") for runs in columns),
        )
    yield "evenness: least / most heard", *(of(runs, "evenness", show=ratio) for runs in columns)


def plans(results: Results) -> Iterator[Sequence[str]]:
    """Yield FedAvg's results by plan: the course of a run, which is the same for all data, and
    accuracy on two kinds."""
    kinds = _values(results, "data")
    ends = list(dict.fromkeys((kinds[0], kinds[-1])))
    cells = [cell for cell in results if cell[:3] == (kinds[-1], "fedavg", "by time")]
    titles = [f"{data}: {what}" for data in ends for what in ("rounds", "minutes", "device-hours")]
    yield (
        *(
            "dropout",
            "deadline, s",
            "over-selection",
            "time wasted, %",
            "abandoned",
            "partial, %",
            "evenness",
        ),
        *(*titles, f"{kinds[-1]}: worst tier, %"),
    )
    for cell in sorted(cells, key=lambda cell: (cell.dropout, -cell.deadline, cell.over_selection)):
        runs = results[cell]
        until = [
            of(results[cell._replace(data=data)], "to_target", key, show=show)
            for data in ends
            for key, show in (("rounds", digits), ("time", minutes), ("device_seconds", hours))
        ]
        yield (
            *(f"{percent(cell.dropout)} %", f"{cell.deadline:g}", f"{cell.over_selection:g}"),
            of(runs, "wasted_share", show=percent),
            of(runs, "abandoned", show=digits),
            of(runs, "partial_share", show=percent),
            of(runs, "evenness", show=ratio),
            *until,
            worst_tier(runs),
        )


def unequal(results: Results) -> Iterator[Sequence[str]]:
    """FedAvg and FedNova with each deadline: slow devices report the steps that they did by
    then."""
    recipes = ("fedavg", "fednova")
    yield (
        *("dropout", "deadline, s", "partial, %"),
        *(
            f"{recipe}: {what}"
            for what in ("rounds", "accuracy, %", "worst tier, %")
            for recipe in recipes
        ),
    )
    cells = [
        cell
        for cell in results
        if cell.recipe == "fednova" and cell._replace(recipe="fedavg") in results
    ]
    last = cells[-1].data
    for cell in sorted(cells, key=lambda cell: (cell.dropout, -cell.deadline)):
        if cell.data != last:
            continue
        both = [results[cell._replace(recipe=recipe)] for recipe in recipes]
        yield (
            *(
                f"{percent(cell.dropout)} %",
                f"{cell.deadline:g}",
                of(both[0], "partial_share", show=percent),
            ),
            *(of(runs, "to_target", "rounds", show=digits) for runs in both),
            *(of(runs, "accuracy", show=percent) for runs in both),
            *map(worst_tier, both),
        )


def equal(results: Results) -> Iterator[Sequence[str]]:
    """The same share of tasks lost, by a hazard or whatever the device."""
    cells = [cell for cell in results if cell.hazard == "equal"]
    yield (
        "dropout",
        "over-selection",
        "vanish",
        "rounds",
        "time",
        "time wasted, %",
        "evenness",
        "worst tier, %",
    )
    for cell in sorted(cells, key=lambda cell: (cell.dropout, cell.over_selection)):
        for hazard in ("by time", "equal"):
            runs = results.get(cell._replace(hazard=hazard), [])
            if not runs:
                continue
            yield (
                *(f"{percent(cell.dropout)} %", f"{cell.over_selection:g}", hazard),
                of(runs, "to_target", "rounds", show=digits),
                of(runs, "to_target", "time", show=minutes),
                of(runs, "wasted_share", show=percent),
                of(runs, "evenness", show=ratio),
                worst_tier(runs),
            )
