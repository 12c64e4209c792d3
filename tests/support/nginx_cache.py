"""For tests and benchmarks: nginx as examples/nginx_cache.conf has it, without TLS and on this
machine."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples/nginx_cache.conf"
HERE = "127.0.0.1"
PROGRAM = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
"""None: there is no nginx."""
AROUND = """daemon off;
{user}
pid {folder}/nginx.pid;
error_log {folder}/error.log warn;
worker_processes 1;
events {{ worker_connections 1024; }}
http {{
    access_log {folder}/access.log;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
{own}}}
"""


@contextmanager
def nginx_cache(folder: Path, origin: int, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A cache that listens on ``port`` and asks the coordinator's port ``origin``. ``folder``: for
    what it keeps, and its log. Yields its first process."""
    assert PROGRAM is not None
    folder.mkdir(parents=True, exist_ok=True)
    own = EXAMPLE.read_text().replace("/var/cache/nginx/fleet", str(folder / "cache"))
    own = own.replace("127.0.0.1:8769", f"{HERE}:{origin}")
    own = own.replace("listen 443 ssl", f"listen {HERE}:{port}")
    own = re.sub(r"(?m)^ *ssl_.*\n", "", own)
    user = "" if os.getuid() else "user root;"
    config = folder / "nginx.conf"
    config.write_text(AROUND.format(folder=folder, own=own, user=user))
    command = [PROGRAM, "-c", str(config), "-p", str(folder), "-e", str(folder / "error.log")]
    process = subprocess.Popen(command)
    try:
        until = time.monotonic() + 20
        while True:
            try:
                socket.create_connection((HERE, port), 1).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError((folder / "error.log").read_text()) from None
                time.sleep(0.02)
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        finally:
            process.kill()
