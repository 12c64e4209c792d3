"""For tests: an S3 server (moto's) with a bucket, which may go away for a while."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import obstore
from moto.server import ThreadedMotoServer
from obstore.store import S3Store
from processes import free_port

BUCKET = "fleet-bucket"
LASTING = Path(__file__).with_name("lasting_object_server.py")


class ObjectServer:
    """Keeps its objects while it is away, as a store does that is restarted."""

    def __init__(self) -> None:
        self._port = free_port()
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._port}",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "tests",
            "AWS_SECRET_ACCESS_KEY": "a secret of tests",
        }
        self.start()

    def start(self) -> None:
        self._server = ThreadedMotoServer("127.0.0.1", self._port, verbose=False)
        self._server.start()

    def stop(self) -> None:
        self._server.stop()

    def names(self) -> list[str]:
        """Return the names of all objects."""
        config = {
            "endpoint": self.environment["AWS_ENDPOINT_URL"],
            "access_key_id": "tests",
            "secret_access_key": "a secret of tests",
        }
        store = S3Store(BUCKET, region="us-east-1", client_options={"allow_http": True}, **config)
        return [each["path"] for page in obstore.list(store) for each in page]


class KilledObjectServer(ObjectServer):
    """A process that is killed with SIGKILL where the other one stops. Its objects are in a
    folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        super().__init__()

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        place = [str(self._folder / "objects"), "127.0.0.1", str(self._port), BUCKET]
        with (self._folder / "object-server.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(LASTING), *place], stdout=log, stderr=log
            )
        until = time.monotonic() + 60
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 1):
                return
            assert self.process.poll() is None, (self._folder / "object-server.log").read_text()
            assert time.monotonic() < until, "the object server does not answer"
            time.sleep(0.02)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def killed_object_server(folder: Path) -> Iterator[KilledObjectServer]:
    """As ``object_server``, with its objects below a folder."""
    server = KilledObjectServer(folder)
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def object_server() -> Iterator[ObjectServer]:
    """A server with a bucket called BUCKET."""
    from moto import mock_aws  # it takes a second
    from moto.s3.models import s3_backends

    with mock_aws():
        server = ObjectServer()
        try:
            s3_backends["123456789012"]["aws"].create_bucket(BUCKET, "us-east-1")
            yield server
        finally:
            server.stop()
