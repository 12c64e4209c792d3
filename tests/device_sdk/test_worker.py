"""A process that does jobs for another one: what is in its answers, and when it ends."""

from __future__ import annotations

import subprocess
import sys
from io import BytesIO

import psutil
import pytest
from fleetlearn_device.worker import JobContent
from processes import wait_for

WORKER = """
import sys
from fleetlearn_device.worker import serve_jobs

def do_job(job, content):
    print("a library says something")
    if job.get("text") is None:
        raise KeyError("text")
    return {"text": job["text"][::-1], "loss": float("nan")}, content.read(2)[::-1]

def prepare():
    if sys.argv[1:]:
        raise OSError("no  such\\nfile")
    return do_job

sys.exit(serve_jobs(prepare))
"""


def answers(written: bytes, *arguments: str) -> tuple[int, bytes]:
    command = [sys.executable, "-c", WORKER, *arguments]
    ended = subprocess.run(command, input=written, capture_output=True, timeout=60)
    return ended.returncode, ended.stdout


def test_each_job_has_its_answer_and_what_a_job_did_not_read_is_skipped() -> None:
    jobs = b'{"text":"ab","bytes":5}\n\x00\n12\xff{"bytes":3}\n{\n}{"text":"cd","bytes":2}\n12'
    assert answers(jobs) == (
        0,
        b'{"text":"ba","loss":null,"bytes":2}\n\n\x00'
        b'{"error":"\'text\'","bytes":0}\n'
        b'{"text":"dc","loss":null,"bytes":2}\n21',
    )


def test_an_input_that_ends_within_a_job_gets_no_answer() -> None:
    assert answers(b'{"text":"ab","bytes":5}\n12') == (1, b"")
    assert answers(b'{"text":"ab","by') == (1, b"")


def test_what_cannot_begin_says_why() -> None:
    assert answers(b"", "x") == (1, b'{"error":"no such file","bytes":0}\n')


def test_a_job_has_no_more_bytes_than_were_announced() -> None:
    content = JobContent(BytesIO(b"12345"), 3)
    assert content.read(2) == b"12"
    with pytest.raises(ValueError, match="the job has 1 bytes left, 2 are expected"):
        content.read(2)


def test_the_process_ends_when_its_parent_is_gone_whatever_holds_its_input_open() -> None:
    """The test keeps the input open: only the look at the parent can end the process."""
    starter = (
        "import subprocess, sys, time\n"
        f"started = subprocess.Popen([sys.executable, '-c', {WORKER!r}])\n"
        "print(started.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", starter]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        parent.stdin.write(b'{"text":"ab","bytes":2}\n12')
        parent.stdin.flush()
        assert parent.stdout.readline() == b'{"text":"ba","loss":null,"bytes":2}\n'
        parent.kill()
        parent.wait()
        wait_for(lambda: has_ended(worker), "the end of the process")


def has_ended(process: psutil.Process) -> bool:
    """Nobody may be there to hear of its end: then it stays as a zombie."""
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
