"""Make the README's picture from the demo's plot: ``make docs/demo.png``, after ``make demo``.

shrink_picture.py PLOT.png PICTURE.png
"""

from __future__ import annotations

import sys

from PIL import Image

WIDTH = 900
COLOURS = 48
"""The plot is lines on white: this many keep it sharp, at a quarter of the size."""


def main(plot: str, picture: str) -> None:
    image = Image.open(plot).convert("RGB")
    smaller = image.resize((WIDTH, round(image.height * WIDTH / image.width)), Image.Resampling.LANCZOS)
    smaller.quantize(COLOURS).save(picture, optimize=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
