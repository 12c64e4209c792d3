"""How updates travel."""

import numpy as np
from fleetlearn_protocol import BlockFormat


def upper_bytes(block: int = 1024):
    """The upper two of the four bytes of each float32."""

    def size(n):  # elements of a block -> its bytes
        return 2 * n

    def encode(rows, fractions):  # float32, shape (blocks, n)
        whole = rows.astype("<f4").view(np.uint8).reshape(*rows.shape, 4)
        return whole[..., 2:].reshape(len(rows), -1)

    def decode(content, n):  # uint8, shape (blocks, size(n)): the bytes of anybody
        whole = np.zeros((len(content), n, 4), np.uint8)
        whole[..., 2:] = content.reshape(len(content), n, 2)
        return whole.reshape(len(content), 4 * n).view("<f4")

    return BlockFormat(block, size, encode, decode)
