"""The exit statuses of fleetlearn-device, and what leads to each."""

from __future__ import annotations

import sys

EXIT = """exit status:
  0    stopped by SIGTERM or SIGHUP, or the training is finished (--until-finished)
  1    the state directory or the runtime cannot be used, or the coordinator refuses what the
       device states
  2    wrong usage or settings, or data that do not fit
  3    another process speaks for the same device
  4    the coordinator does not let the device in: a used or expired token, or none; a revoked
       credential (*)
  5    TLS: a certificate that is not accepted, or ws:// and wss:// mixed up (*)
  6    the coordinator speaks another version of the protocol (*)
  7    no connection for 15 minutes (*)
  130  stopped by SIGINT (Ctrl-C)

(*) with --until-finished. Without it the device says each time what is wrong and goes on trying,
    slowly; with status 4 it ends also where no coordinator ever let it in.
"""
"""What ``run --help`` says of them."""


def fail(status: int, text: str) -> int:
    """Say what went wrong, and return the exit status."""
    print(f"fleetlearn-device: {text}", file=sys.stderr)
    return status
