from __future__ import annotations

import numpy as np
import pytest
from fleetlearn_device.data import permutation
from fleetlearn_simulator.orders import permutations


@pytest.mark.parametrize("examples", [1, 3, 4, 50, 257])
def test_each_device_orders_its_examples_itself(examples: int) -> None:
    seeds = np.array([0, 1, 2**32, 2**53 - 1, 987654321])
    for epoch in (0, 1, 19):
        expected = np.stack([permutation(examples, int(seed), epoch) for seed in seeds])
        np.testing.assert_array_equal(permutations(examples, seeds, epoch), expected)
