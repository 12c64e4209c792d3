"""How MovieLens' ratings are divided, on a few made-up ones."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

STUDIES = Path(__file__).parents[2] / "benchmarks" / "studies"


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    before = {*sys.modules}
    monkeypatch.syspath_prepend(str(STUDIES))
    import _movielens_data

    yield _movielens_data
    for name in {*sys.modules} - before:
        if name in ("_movielens_data", "_packaged_data", "_pickled_tables"):
            del sys.modules[name]


def test_a_fifth_of_each_person_s_ratings_is_held_out(loader: ModuleType) -> None:
    random = np.random.default_rng(0)
    user = np.repeat(np.arange(30), 20)[random.permutation(600)]
    film = random.integers(0, 8, 600)
    rating = random.integers(1, 11, 600).astype(np.float32) / 2
    data = loader.Ratings(user, film, rating)
    made = loader.split(data, 1)
    assert (np.bincount(made.train.user) == 16).all()
    assert (np.bincount(made.test.user) == 4).all()
    assert (made.users, made.films) == (30, 8)
    found = np.sort(np.concatenate([made.train.rating, made.test.rating]))
    assert np.array_equal(found, np.sort(rating))
    assert not np.array_equal(loader.split(data, 2).test.film, made.test.film)


def test_films_that_nobody_rates_in_training_are_not_measured(loader: ModuleType) -> None:
    user = np.repeat(np.arange(2), 5)
    film = np.arange(10)  # each rated once
    data = loader.Ratings(user, film, np.ones(10, np.float32))
    made = loader.split(data, 1)
    assert len(made.train.user) == 8
    assert not len(made.test.user)
