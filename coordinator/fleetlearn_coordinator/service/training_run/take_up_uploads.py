"""What a start takes up of the uploads that an earlier process did not receive to their end."""

from __future__ import annotations

from collections.abc import Mapping

from fleetlearn_coordinator.conversation.begun import BegunUploads, are_here, decode_begun
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
        if are_here(begun, store.blobs.read_spool_file):
            kept.keep(begun)
        else:
            store.blobs.free_spool_file(number)
    return kept.bytes_kept
