"""Folders of images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from fleetlearn_protocol.errors import in_words
from numpy.typing import NDArray

from fleetlearn_device.data.labelled_files import folder_version, label_choices, labelled_files
from fleetlearn_device.data.raw import Choices, RawRows, RawSource, extra_missing
from fleetlearn_device.runtimes.checks import DataError

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
MODES = {"rgb": "RGB", "gray": "L"}


def open_images(path: Path, choices: Choices) -> RawSource:
    """A folder of images: ``image``, shape (n, channels, height, width), and ``label``.

    Options: labels, classes (see ``LabelChoices``), mode (rgb, gray), size (WIDTHxHEIGHT, to which
    images are scaled; unless given all must have one size), divide (by which the values 0 to 255
    are divided: the images are then float32, and uint8 else).
    """
    told = label_choices(choices)
    mode, size = MODES[choices.one_of("mode", tuple(MODES))], choices.text("size")
    width, _, height = size.partition("x")
    if size and not (width.isdecimal() and height.isdecimal() and int(width) * int(height)):
        raise DataError(
            f"{path}: the option size is {size!r}; expected WIDTHxHEIGHT, such as 32x32"
        )
    scaled = (int(width), int(height)) if size else None
    divide = choices.whole("divide")

    def load() -> RawRows:
        files, labels = labelled_files(path, ENDINGS, told)
        images = read_images(files, mode, scaled)
        if divide:
            images = images / np.float32(divide)
        return RawRows(
            {"image": images, "label": labels},
            lambda row: str(files[row].relative_to(path)),
        )

    return RawSource(
        str(path), load, lambda: folder_version(path, ENDINGS, told.labels), ("image", "label")
    )


def read_images(
    files: list[Path], mode: str = "RGB", size: tuple[int, int] | None = None
) -> NDArray[Any]:
    """Return images as uint8, shape (n, channels, height, width).

    Raises DataError: Pillow is not installed, a file that is no image, images of different sizes.
    """
    try:
        from PIL import Image
    except ImportError:
        raise extra_missing("pillow", "images", "a folder of images") from None
    images: NDArray[Any] | None = None
    for number, file in enumerate(files):
        try:
            with Image.open(file) as opened:
                image = opened.convert(mode)
                if size is not None:
                    image = image.resize(size, Image.Resampling.BILINEAR)
                pixels = np.asarray(image)
        except (OSError, ValueError, SyntaxError) as error:
            raise DataError(f"{file} cannot be read as an image: {in_words(error)}") from None
        pixels = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
        if images is None:
            images = np.empty((len(files), *pixels.shape), np.uint8)
        if pixels.shape != images.shape[1:]:
            _, height, width = pixels.shape
            raise DataError(
                f"{file} is {width}x{height}, and {files[0]} is {images.shape[3]}x"
                f"{images.shape[2]}; expected one size: say size=WIDTHxHEIGHT to scale all"
            )
        images[number] = pixels
    assert images is not None  # labelled_files gave at least one
    return images
