"""For tests: an S3 server (moto's) with a bucket, which may go away for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import obstore
from moto.server import ThreadedMotoServer
from obstore.store import S3Store
from processes import free_port

BUCKET = "fleet-bucket"


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
