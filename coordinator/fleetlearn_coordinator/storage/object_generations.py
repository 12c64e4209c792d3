"""The objects of a run whose coordinator may change: each coordinator writes under names of its
own, so that a late write of one that has lost the run replaces nothing.

A put that is on its way when a machine is cut off is tried again for a minute, and may arrive when
another coordinator has long taken the run over, and has put its own bytes there: no lock can stop
it. So an object's name ends with its writer's *generation*, a number: each coordinator's is above
those of all before it. Where there are several of one name, the highest generation is what counts:
a coordinator never writes again what counts, so what it has written under a name is not older than
what it found there.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from fleetlearn_protocol.errors import Code

from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.object_store import Objects


class NewestObjects:
    """The newest objects of each name, to be read. Every method may be called in any thread, and
    raises StoreUnavailableError."""

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        self.generations: dict[str, int] = {}
        """Name -> the highest generation that there is."""
        self.replaced: list[str] = []
        """Names, with their generations, of objects that others replaced."""
        self.look()

    def look(self) -> None:
        """Find out which objects there are."""
        found: dict[str, int] = {}
        replaced = []
        for key in self.objects.keys(""):
            name, _, generation = key.rpartition(".")
            if not generation.isdecimal():
                continue
            number, before = int(generation), found.get(name)
            found[name] = number if before is None else max(number, before)
            if before is not None:
                replaced.append(f"{name}.{min(number, before)}")
        self.generations, self.replaced = found, replaced

    def name(self, key: str) -> str:
        """Return where an object is or would be, for messages to people."""
        return self.objects.name(self._full(key) or key)

    def names(self, folder: str) -> list[str]:
        """Return the names of the objects in a folder, without the folder's."""
        prefix = f"{folder}/"
        return [key.removeprefix(prefix) for key in self.generations if key.startswith(prefix)]

    def fetch(self, key: str, path: Path) -> None:
        """As ``Objects.fetch``."""
        full = self._full(key)
        if full is None:
            raise StoreError(Code.UNKNOWN_CONTENT, f"{self.name(key)} is missing")
        self.objects.fetch(full, path)

    def size(self, key: str) -> int | None:
        """As ``Objects.size``."""
        full = self._full(key)
        return None if full is None else self.objects.size(full)

    def _full(self, key: str) -> str | None:
        number = self.generations.get(key)
        return None if number is None else f"{key}.{number}"


class OwnObjects(NewestObjects):
    """The objects of the coordinator that has the run, which writes them too."""

    def __init__(self, objects: Objects, least: int) -> None:
        """``least``: a generation that no earlier coordinator has had, as far as the caller
        knows."""
        super().__init__(objects)
        self.generation = max([least, *(each + 1 for each in self.generations.values())])

    def drop_replaced(self) -> None:
        """Remove what earlier coordinators have replaced."""
        self.objects.remove(self.replaced)
        self.replaced = []

    def put(self, key: str, content: Path | bytes | Iterable[bytes]) -> None:
        """As ``Objects.put``."""
        self.objects.put(f"{key}.{self.generation}", content)
        self.generations[key] = self.generation

    def remove(self, keys: Iterable[str]) -> None:
        """As ``Objects.remove``."""
        there = [key for key in keys if key in self.generations]
        self.objects.remove(f"{key}.{self.generations[key]}" for key in there)
        for key in there:
            self.generations.pop(key, None)
