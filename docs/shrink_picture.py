"""Make the README's picture from the demo's plot: ``make docs/demo.png``, after ``make demo``.

shrink_picture.py PLOT.png PICTURE.png
"""

from __future__ import annotations

import sys

from PIL import Image

WIDTH = 900
COLOURS = 64
"""The plot is lines on white: this many keep its colours, at a fifth of its size."""


def main(plot: str, picture: str) -> None:
    image = Image.open(plot).convert("RGB")
    smaller = image.resize(
        (WIDTH, round(image.height * WIDTH / image.width)), Image.Resampling.LANCZOS
    )
    smaller.quantize(COLOURS, method=Image.Quantize.FASTOCTREE).save(picture, optimize=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
