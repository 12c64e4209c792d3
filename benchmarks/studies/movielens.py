"""MovieLens, one person on each device: matrix factorisation whose person's part stays at home, and
whose table of films travels by the rows that a person rated.

671 devices have the ratings of one person each. A rating is predicted as mean + the person's bias +
the film's bias + the product of the person's and the film's vectors; the person's two are personal
parameters. Each run is the simulator's, with the real engine; what is held out of each person's
ratings is measured with that person's own parameters. docs/studies/movielens.md says more.

    python benchmarks/studies/movielens.py [--quick] [--json FILE] [--figure FILE.svg]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import _add_benchmarks_to_path  # noqa: F401
import _measure as measure
import numpy as np
from _movielens_central import BASELINES, matrix_factorisation
from _movielens_data import Split, all_ratings, split
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.vector import Vector, views
from fleetlearn_simulator import Options, simulate
from fleetlearn_simulator.fleet.fleet import Fleet
from fleetlearn_simulator.results.run_folder import ROUNDS, read_rows
from fleetlearn_simulator.scenario.scenario import Scenario
from fleetlearn_simulator.training.kept_rows import NO_ROW
from numpy.typing import NDArray

HERE = Path(__file__).resolve().parent
WIDTH = 8
"""Numbers in a person's or a film's vector."""
DECAY = 0.1
"""Weight of the squared biases and vectors in the loss."""
COHORT = 67
"""Devices of a round: a tenth."""
DEFAULT_ROUNDS = 120


class Method(NamedTuple):
    """One way to train."""

    rows: str
    """``aggregation.rows`` of the plan."""
    lr: float
    """Of the devices."""
    server: Mapping[str, Any] = {}
    """[server] of the plan."""
    encoding: Mapping[str, str] = {}
    """[encoding] of the plan."""


METHODS = {
    "FedAvg, whole table": Method("whole", 0.3),
    "FedAvg, rows, over all": Method("all", 0.3),
    "FedAvg, rows, over those that have them": Method("touched", 0.3),
    "the same, int8 up and float16 down": Method(
        "touched", 0.3, encoding={"up": "int8", "down": "float16"}
    ),
}


def export(folder: Path, films: int, mean: float) -> Path:
    """Export the model of one person's ratings."""
    import torch
    from fleetlearn_export import LocalStep, export_bundle
    from torch import Tensor, nn

    class Person(nn.Module):
        """Predicts ratings of films, and the squares that the loss keeps small."""

        def __init__(self) -> None:
            super().__init__()
            self.mean = nn.Parameter(torch.tensor(mean))
            self.film, self.film_bias = nn.Embedding(films, WIDTH), nn.Embedding(films, 1)
            self.person = nn.Parameter(0.1 * torch.randn(WIDTH))
            self.person_bias = nn.Parameter(torch.zeros(1))
            nn.init.normal_(self.film.weight, 0.0, 0.1)
            nn.init.zeros_(self.film_bias.weight)

        def forward(self, film: Tensor) -> tuple[Tensor, Tensor]:
            vector, bias = self.film(film), self.film_bias(film)[:, 0]
            found = self.mean + self.person_bias + bias + (vector * self.person).sum(1)
            squares = (vector**2).sum(1) + bias**2
            squares = squares + (self.person**2).sum() + self.person_bias**2
            return found, squares

    def loss(outputs: tuple[Tensor, Tensor], rating: Tensor) -> Tensor:
        found, squares = outputs
        return ((found - rating) ** 2 + DECAY * squares).mean() / 2

    def squared_error(outputs: tuple[Tensor, Tensor], rating: Tensor) -> Tensor:
        return (outputs[0] - rating) ** 2

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Person()
    path = folder / "movielens.bundle"
    export_bundle(
        model,
        loss,
        (torch.arange(4), torch.ones(4)),
        path,
        names=["film", "rating"],
        step=LocalStep(),
        metrics={"squared_error": squared_error},
        personal=["person", "person_bias"],
        sparse=["film", "film_bias"],
    )
    return path


def scenario(bundle: Path, method: Method, people: int, rounds: int, seed: int) -> Scenario:
    tables = {
        "name": "movielens",
        "seed": seed,
        "plan": {
            "bundle": str(bundle),
            "recipe": "fedper",
            "local": {
                "epochs": 2,
                "batch_size": 16,
                "lr": method.lr,
                "schedule": {"kind": "cosine"},
            },
            "round": {"goal": COHORT, "over_selection": 1.0, "weighting": "examples"},
            "aggregation": {"rows": method.rows},
            "encoding": dict(method.encoding),
            "server": dict(method.server),
            "stop": {"rounds": rounds},
        },
        "population": {"size": people},
        "data": {
            "kind": "function",
            "function": "_movielens_data:device",
            "path": str(HERE),
            "seed": seed,
        },
    }
    return Scenario.read(tables, bundle.parent)


def rmse(found: NDArray[Any], data: Split) -> float:
    """Return the root of the mean squared error on what is held out. found: predictions, which are
    held to the scale of ratings."""
    errors = np.clip(found, 0.5, 5.0) - data.test.rating
    return float(np.sqrt(np.mean(errors.astype(np.float64) ** 2)))


def predicted(table: Sequence[Any], model: Vector, people: NDArray[Any], data: Split) -> Any:
    """Return the predictions of the held-out ratings. table: the bundle's travelling parameters.
    people: each person's vector and bias, shape (people, WIDTH + 1)."""
    part, test = views(model, table), data.test
    vector, bias = people[test.user, :WIDTH], people[test.user, WIDTH]
    product = (part["film.weight"][test.film] * vector).sum(axis=1)
    return part["mean"] + bias + part["film_bias.weight"][test.film, 0] + product


class Curve(NamedTuple):
    """What a run gave."""

    rounds: list[int]
    rmse: list[float]
    """After each of these rounds."""
    down: float
    """Bytes of a device in a round, in the mean, without the bundle."""
    up: float


def run(bundle: Path, method: Method, rounds: int, every: int, seed: int) -> Curve:
    """Simulate one run."""
    data, opened = split(all_ratings(), seed), open_bundle(bundle)
    begun, size = opened.parameters(), opened.manifest.size
    places, errors, with_bundle = list[int](), list[float](), set[int]()

    def measured(fleet: Fleet) -> None:
        number = len(fleet.history)
        with_bundle.update(fleet.tasks.has_bundle)
        if number % every and number != rounds:
            return
        people = np.tile(begun[size:], (data.users, 1))
        kept = fleet.coordinator.kept
        assert kept is not None
        assert kept.states is not None
        for device, row in enumerate(kept.states.of(range(data.users))):
            if row != NO_ROW:
                people[device] = kept.states.file.read(row)
        table = opened.manifest.travelling
        places.append(number)
        errors.append(rmse(predicted(table, fleet.coordinator.model, people, data), data))

    options = Options(backend="bundle", workers=1, events=False, checkpoint=10**9)
    with TemporaryDirectory() as folder:
        outcome = simulate(
            scenario(bundle, method, data.users, rounds, seed),
            Path(folder) / "run",
            options,
            progress=measured,
        )
        assert outcome is not None
        rows = read_rows(outcome.folder, ROUNDS)
    graphs = sum(opened.manifest.files[f"graphs/{name}.onnx"].size for name in ("train", "eval"))
    tasks = COHORT * len(rows)
    down = sum(row["bytes"]["down"] for row in rows) - graphs * len(with_bundle)
    return Curve(places, errors, down / tasks, sum(row["bytes"]["up"] for row in rows) / tasks)


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument("--quick", action="store_true", help="one seed, ten rounds")
    options.add_argument("--seeds", type=int, default=2)
    options.add_argument("--rounds", type=int, default=DEFAULT_ROUNDS)
    options.add_argument("--workers", type=int, default=2, help="runs at a time")
    options.add_argument("--figure", type=Path, metavar="FILE.svg", help="draw the curves")
    chosen = options.parse_args()
    if chosen.quick:
        chosen.seeds, chosen.rounds = 1, 10
    seeds, every = range(1, chosen.seeds + 1), max(1, chosen.rounds // 30)
    data = [split(all_ratings(), seed) for seed in seeds]
    central = {
        name: [rmse(baseline(each), each) for each in data] for name, baseline in BASELINES.items()
    }
    passes = 5 if chosen.quick else 30
    central["matrix factorisation in one place"] = [
        rmse(matrix_factorisation(each, WIDTH, DECAY, passes), each) for each in data
    ]
    with (
        TemporaryDirectory() as folder,
        ProcessPoolExecutor(chosen.workers, mp_context=get_context("spawn")) as pool,
    ):
        mean = float(data[0].train.rating.mean())
        bundle = export(Path(folder), data[0].films, mean)
        waiting = {
            (name, seed): pool.submit(run, bundle, method, chosen.rounds, every, seed)
            for name, method in METHODS.items()
            for seed in seeds
        }
        found = {name: [waiting[name, seed].result() for seed in seeds] for name in METHODS}
    print(measure.table(rows_of(central, found)))
    runs = {name: [each._asdict() for each in curves] for name, curves in found.items()}
    if chosen.figure is not None:
        from _movielens_figure import draw

        draw(chosen.figure, central, runs)
    settings = {key: value for key, value in vars(chosen).items() if key not in ("json", "figure")}
    measure.write_json(chosen.json, settings, {"central": central, "federated": runs})


def rows_of(
    central: Mapping[str, Sequence[float]], found: Mapping[str, Sequence[Curve]]
) -> list[Sequence[str]]:
    """Return the table of results."""
    head = ("how", "RMSE at the end", "the least, and its round", "down, KB", "up, KB")
    rows: list[Sequence[str]] = [head]
    rows += [(name, _spread(values), "", "", "") for name, values in central.items()]
    for name, curves in found.items():
        least = [min(zip(each.rmse, each.rounds, strict=True)) for each in curves]
        best = f"{np.median([value for value, _ in least]):.4f}, "
        best += f"{np.median([place for _, place in least]):.0f}"
        sizes = (f"{np.median([each[at] for each in curves]) / 1e3:.1f}" for at in (2, 3))
        rows.append((name, _spread([each.rmse[-1] for each in curves]), best, *sizes))
    return rows


def _spread(values: Sequence[float]) -> str:
    return measure.show(measure.middle(values)) if len(values) > 1 else f"{values[0]:.4f}"


if __name__ == "__main__":
    main()
