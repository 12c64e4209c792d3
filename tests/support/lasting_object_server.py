"""For tests: an S3 server (moto's) as a process that may be killed and started again, with its
objects: what it has answered for is in a folder, as a store's would be.

    python lasting_object_server.py FOLDER HOST PORT BUCKET
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.s3.models import s3_backends
from werkzeug.serving import run_simple

ACCOUNT, REGION = "123456789012", "us-east-1"


class LastingObjects:
    """A WSGI application: moto's, whose bucket is in a folder before a change is answered."""

    def __init__(self, folder: Path, bucket: str) -> None:
        self._folder, self._bucket = folder, bucket
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._backend = s3_backends[ACCOUNT]["aws"]
        self._backend.create_bucket(bucket, REGION)
        self._kept: dict[str, str] = {}
        """Name -> ETag of each object that the folder has."""
        self._lock = threading.Lock()
        folder.mkdir(exist_ok=True)
        for file in folder.glob("*.object"):
            name, _, content = file.read_bytes().partition(b"\n")
            found = self._backend.put_object(bucket, json.loads(name), content)
            self._kept[found.name] = found.etag

    def __call__(
        self, environment: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        if environment["REQUEST_METHOD"] in ("GET", "HEAD"):
            return iter(self._moto(environment, start_response))
        heads: list[tuple[Any, ...]] = []
        with self._lock:
            body = list(self._moto(environment, lambda *head: heads.append(head)))
            self._keep()
        start_response(*heads[-1])
        return body

    def _keep(self) -> None:
        """Write what has changed into the folder."""
        now = dict(self._objects())
        for name in self._kept.keys() - now.keys():
            self._file(name).unlink()
            del self._kept[name]
        for name, found in now.items():
            if self._kept.get(name) != found.etag:
                draft = self._folder / "draft"
                draft.write_bytes(json.dumps(name).encode() + b"\n" + found.value)
                draft.replace(self._file(name))
                self._kept[name] = found.etag

    def _objects(self) -> Iterator[tuple[str, Any]]:
        yield from list(self._backend.buckets[self._bucket].keys.items())

    def _file(self, name: str) -> Path:
        return self._folder / f"{hashlib.sha256(name.encode()).hexdigest()}.object"


def main() -> None:
    folder, host, port, bucket = sys.argv[1:]
    objects = LastingObjects(Path(folder), bucket)
    run_simple(host, int(port), objects, threaded=True)


if __name__ == "__main__":
    main()
