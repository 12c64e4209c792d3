"""What a start takes up of the uploads that an earlier process did not receive to their end."""

from __future__ import annotations

from collections.abc import Mapping

from fleetlearn_protocol.vector import checksum

from fleetlearn_coordinator.conversation.begun import BegunUpload, BegunUploads, decode_begun
from fleetlearn_coordinator.storage.blobs import Blobs
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.store import Store


def take_up_uploads(store: Store, kept: BegunUploads, tasks: Mapping[str, str]) -> int:
    """Keep the begun uploads whose bytes are here, of tasks that still run, and remove the other
    checkpoints. Call after the accepted updates were taken back. Returns the bytes that are here.

    tasks: device -> its task.
    """
    for number, content in store.begun_uploads().items():
        begun = decode_begun(content)
        if begun is None or begun.spool_file != number or tasks.get(begun.device) != begun.task:
            store.blobs.drop_checkpoint(number)
            continue
        store.blobs.reserve_spool_file(number)
        if _is_here(store.blobs, begun):
            kept.keep(begun)
        else:
            store.blobs.free_spool_file(number)
    return kept.bytes_kept


def _is_here(blobs: Blobs, begun: BegunUpload) -> bool:
    """Return whether the spool file has the bytes that the checkpoint is of. The checksums at an
    upload's end are of what arrived: they would not notice what a loss of power took."""
    begin = 0
    try:
        for part in begun.parts:
            size = min(part.size, begun.offset - begin)
            if size <= 0:
                break
            found = 0
            for block in blobs.read_spool_file(begun.spool_file, size, begin):
                found = checksum(block, found)
            if found != begun.crc32.get(part.name):
                return False
            begin += size
    except (StoreError, OSError):
        return False
    return begin == begun.offset
