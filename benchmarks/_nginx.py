"""nginx in front of a server to measure: nginx ends TLS, and passes plain WebSockets on."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from _measure import scratch
from _servers import Server, server_process, wait_until
from fleetlearn_coordinator.network.process_settings import BACKLOG
from fleetlearn_coordinator.service.private_ca import CA, CERTIFICATE, KEY, make_certificate

NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin")
CONFIGURATION = """\
daemon off;
{user}
worker_processes {workers};
worker_rlimit_nofile 400000;
error_log stderr error;
pid nginx.pid;
events {{ worker_connections {connections}; multi_accept on; }}
http {{
    access_log off;
    client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path f; uwsgi_temp_path u;
    scgi_temp_path s;
    upstream coordinator {{ server {upstream}; }}
    server {{
        listen 127.0.0.1:{port} ssl backlog={backlog} reuseport;
        ssl_certificate {certificate};
        ssl_certificate_key {key};
        ssl_protocols TLSv1.3;
        ssl_session_cache off;
        location / {{
            proxy_pass http://coordinator;
            proxy_http_version 1.1;
            proxy_set_header Upgrade $http_upgrade;
            proxy_set_header Connection "upgrade";
            proxy_set_header Host $http_host;
            proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
            proxy_buffer_size {buffer};
            proxy_buffers 4 {buffer};
            proxy_read_timeout 1h;
            proxy_send_timeout 1h;
        }}
    }}
}}
"""
"""docs/operate/proxies.md has the same for operators."""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def behind_nginx(
    serving: AbstractContextManager[Server],
    devices: int,
    *,
    workers: int = 1,
    buffer: str = "16k",
) -> Iterator[Server]:
    """The server, reached through nginx over TLS by as many devices. ``workers``: processes of
    nginx. ``buffer``: its buffer for each direction of a connection. Raises SystemExit where there
    is no nginx."""
    if NGINX is None:
        sys.exit("--nginx needs the program nginx (apt install nginx-light)")
    with serving as server, scratch() as folder:
        make_certificate(folder, ["127.0.0.1"], days=30)
        port = free_port()
        file = folder / "nginx.conf"
        file.write_text(
            CONFIGURATION.format(
                user="user root;" if os.getuid() == 0 else "",
                workers=workers,
                connections=2 * devices + 100,
                upstream=server.url.partition("://")[2],
                port=port,
                backlog=BACKLOG,
                certificate=folder / CERTIFICATE,
                key=folder / KEY,
                buffer=buffer,
            )
        )
        log = folder / "nginx.log"
        command = [NGINX, "-p", str(folder), "-e", "stderr", "-c", str(file)]
        with server_process(command, log) as process:
            wait_until(lambda: _listens(port), process)
            yield server._replace(
                url=f"wss://127.0.0.1:{port}", ca=folder / CA, others=(process.pid,)
            )


def _listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0
