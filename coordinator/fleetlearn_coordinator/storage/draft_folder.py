"""A folder that is there whole, or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex

from fleetlearn_protocol.errors import Code

from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.lock import LOCK, is_locked

ENDING = ".fleetlearn-draft"


@contextmanager
def draft_folder(target: Path) -> Iterator[Path]:
    """Yield a new folder beside ``target``, for this user alone, which gets the name ``target``
    when the block ends.

    An error in the block removes the folder. What a process left that was killed is removed by the
    next one beside it. Raises StoreError where ``target`` is there and not empty.
    """
    _refuse_used(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in target.parent.glob(f".*{ENDING}"):
        if not is_locked(left):  # whoever made it is dead
            shutil.rmtree(left, ignore_errors=True)
    draft = target.with_name(f".{target.name}.{token_hex(8)}{ENDING}")
    draft.mkdir(mode=0o700)
    descriptor = os.open(draft, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield draft
        draft.rename(target)  # the system refuses a folder that is not empty
        parent = os.open(target.parent, os.O_RDONLY)
        os.fsync(parent)
        os.close(parent)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    finally:
        os.close(descriptor)


def _refuse_used(target: Path) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise StoreError(Code.DUPLICATE, f"{target} is a file; name a folder that is not there yet")
    locks = [path for path in target.rglob(LOCK) if path.is_file() and is_locked(path)]
    if locks:
        text = f"{target} is in use: a coordinator holds {locks[0].parent}. Name another folder"
        raise StoreError(Code.BUSY, text)
    if any(target.iterdir()):
        text = f"{target} is not empty; name a folder that is not there yet, or an empty one"
        raise StoreError(Code.DUPLICATE, text)
