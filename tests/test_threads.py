"""Libraries that compute use one thread in tests (tests/conftest.py)."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info

NAMES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def test_a_test_computes_in_one_thread() -> None:
    if (chosen := {name: os.environ[name] for name in NAMES}) != dict.fromkeys(NAMES, "1"):
        pytest.skip(f"whoever runs the tests chose {chosen}")
    assert np.ones((64, 64)).dot(np.ones((64, 64)))[0, 0] == 64  # else no BLAS may be loaded yet
    threads = [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]
    assert (torch.get_num_threads(), {*threads}) == (1, {1})
