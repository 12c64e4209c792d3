"""Folders of .wav files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from fleetlearn_protocol.errors import in_words
from numpy.typing import NDArray

from fleetlearn_device.data.labelled_files import folder_version, label_choices, labelled_files
from fleetlearn_device.data.raw import Choices, RawRows, RawSource
from fleetlearn_device.runtimes.checks import DataError

ENDINGS = (".wav",)


def open_sounds(path: Path, choices: Choices) -> RawSource:
    """A folder of .wav files: ``wave``, float32 from -1 to 1, shape (n, channels, length), and
    ``label``.

    Options: labels, classes (see ``LabelChoices``), length (samples; longer sounds are cut, shorter
    ones are filled up with 0; unless given all must have one length), rate (samples a second that
    all must have).
    """
    told = label_choices(choices)
    length, rate = choices.whole("length"), choices.whole("rate")

    def load() -> RawRows:
        files, labels = labelled_files(path, ENDINGS, told)
        sounds = [_fitted(read_wav(file, rate), length) for file in files]
        for file, sound in zip(files, sounds, strict=True):
            if sound.shape != sounds[0].shape:
                raise DataError(
                    f"{file} has (channels, samples) {sound.shape}, and {files[0]} "
                    f"{sounds[0].shape}; expected one shape: say length=SAMPLES to cut and fill up"
                )
        return RawRows(
            {"wave": np.stack(sounds), "label": labels},
            lambda row: str(files[row].relative_to(path)),
        )

    return RawSource(
        str(path), load, lambda: folder_version(path, ENDINGS, told.labels), ("wave", "label")
    )


def read_wav(path: Path, rate: int | None = None) -> NDArray[Any]:
    """Return a .wav file's samples: float32 from -1 to 1, shape (channels, samples).

    Raises DataError: no PCM of 8, 16, 24 or 32 bits, another rate.
    """
    import wave  # here: a device that reads no sounds does without it

    try:
        with wave.open(str(path), "rb") as file:
            found, width, channels = file.getframerate(), file.getsampwidth(), file.getnchannels()
            content = file.readframes(file.getnframes())
    except (OSError, EOFError, wave.Error) as error:
        raise DataError(
            f"{path} cannot be read as .wav: {in_words(error)}; expected PCM of 8 to 32 bits"
        ) from None
    if rate is not None and found != rate:
        raise DataError(f"{path} has {found} samples a second; expected {rate}")
    return _decoded(content, width).reshape(-1, channels).T.copy()


def _decoded(content: bytes, width: int) -> NDArray[Any]:
    if width == 1:  # the one width that is unsigned
        return np.frombuffer(content, np.uint8).astype(np.float32) / 128 - 1
    if width == 3:
        # Each sample becomes the upper three bytes of four.
        wide = np.zeros((len(content) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(content, np.uint8)[: len(content) // 3 * 3].reshape(-1, 3)
        return (wide.reshape(-1).view("<i4") / 2.0**31).astype(np.float32)
    whole = content[: len(content) // width * width]
    return (np.frombuffer(whole, f"<i{width}") / 2.0 ** (8 * width - 1)).astype(np.float32)


def _fitted(sound: NDArray[Any], length: int | None) -> NDArray[Any]:
    if length is None:
        return sound
    fitted = np.zeros((len(sound), length), np.float32)
    fitted[:, : sound.shape[1]] = sound[:, :length]
    return fitted
