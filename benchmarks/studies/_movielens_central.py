"""What all ratings in one place give: means, and matrix factorisation by alternating least
squares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from _movielens_data import Split
from numpy.typing import NDArray

Found = NDArray[Any]
"""Predictions of the held-out ratings."""


def mean(data: Split) -> Found:
    """The mean of all ratings."""
    return np.full(len(data.test.rating), data.train.rating.mean())


def biases(data: Split, shrunk: float = 0.0) -> Found:
    """The mean, a film's bias and a person's bias: each the mean of what is left, as if there were
    ``shrunk`` more ratings without any (Irizarry, "Introduction to Data Science", chapter
    "Regularization")."""
    train, middle = data.train, float(data.train.rating.mean())
    few = 1e-9 + shrunk
    counts = np.bincount(train.film, minlength=data.films)
    film = np.bincount(train.film, train.rating - middle, data.films) / (counts + few)
    rest = train.rating - middle - film[train.film]
    counts = np.bincount(train.user, minlength=data.users)
    user = np.bincount(train.user, rest, data.users) / (counts + few)
    return middle + film[data.test.film] + user[data.test.user]


BASELINES: dict[str, Callable[[Split], Found]] = {
    "the mean of all ratings": mean,
    "film and person biases": biases,
    "the same, shrunk (lambda 3)": lambda data: biases(data, 3.0),
}


def matrix_factorisation(
    data: Split, width: int, decay: float, passes: int, lr: float = 0.02
) -> Found:
    """Stochastic gradient descent over all ratings in a random order, in batches of 64, of the
    study's own loss (Koren, Bell and Volinsky, "Matrix Factorization Techniques for Recommender
    Systems", Computer 42(8), 2009)."""
    random, train = np.random.default_rng(0), data.train
    middle = np.float32(train.rating.mean())
    film = random.normal(0, 0.1, (data.films, width + 1)).astype(np.float32)
    user = random.normal(0, 0.1, (data.users, width + 1)).astype(np.float32)
    film[:, width] = user[:, width] = 0
    for _ in range(passes):
        order = random.permutation(len(train.rating))
        for start in range(0, len(order), 64):
            rows = order[start : start + 64]
            films, users = train.film[rows], train.user[rows]
            own_film, own_user = film[films], user[users]
            found = (own_film[:, :width] * own_user[:, :width]).sum(1)
            found += middle + own_film[:, width] + own_user[:, width]
            error = (found - train.rating[rows])[:, None]
            of_film, of_user = decay * own_film, decay * own_user
            of_film[:, :width] += error * own_user[:, :width]
            of_user[:, :width] += error * own_film[:, :width]
            of_film[:, width:] += error
            of_user[:, width:] += error
            np.subtract.at(film, films, np.float32(lr) * of_film)
            np.subtract.at(user, users, np.float32(lr) * of_user)
    test = data.test
    product = (film[test.film, :width] * user[test.user, :width]).sum(1)
    biased = film[test.film, width] + user[test.user, width]
    last: Found = product + middle + biased
    return last
