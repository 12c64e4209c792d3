"""The socket: bounds, errors for each line, and whose it is."""

from __future__ import annotations

import asyncio
import json
import socket
import stat
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fleetlearn_device import agent as agent_module
from fleetlearn_device.agent import MAX_CLIENTS, MAX_LINE, Agent

PATIENCE = 20.0


async def _echo(asked: dict[str, Any]) -> dict[str, Any]:
    return {"asked": asked}


async def _fail(asked: dict[str, Any]) -> dict[str, Any]:
    raise KeyError("mine")


def with_agent(path: Path, test: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        agent = Agent(path, {"echo": _echo, "fail": _fail})
        await agent.start()
        try:
            async with asyncio.timeout(PATIENCE):
                await test()
        finally:
            await agent.close()
        assert not path.exists()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        (b'{"do": "echo", "id": 7, "a": [1]}', {"id": 7, "ok": True, "asked": {"a": [1]}}),
        (b'{"do": "echo", "id": "a"}', {"id": "a", "ok": True, "asked": {}}),
        (b'{"do": "fail", "id": 1}', {"id": 1, "ok": False, "error": "KeyError: 'mine'"}),
        (b'{"do": "fly"}', {"ok": False, "error": "do is 'fly'; expected one of echo, fail"}),
        (b"{}", {"ok": False, "error": "do is None; expected one of echo, fail"}),
        (b"[1]", {"ok": False, "error": "the line is a list; expected an object"}),
        (b'{"do": "echo', None),
        (b"\xff\xfe", None),
    ],
)
def test_each_line_has_its_answer(tmp_path: Path, line: bytes, answer: Any) -> None:
    async def test() -> None:
        reader, writer = await asyncio.open_unix_connection(tmp_path / "s")
        for _ in range(2):  # an error ends nothing
            writer.write(b"\n" + line + b"\n")
            said = json.loads(await reader.readline())
            if answer is None:
                assert not said["ok"]
                assert said["error"].startswith("the line is not JSON")
            else:
                assert "KeyError" in said.get("error", "KeyError") or said == answer
                assert said["ok"] == answer["ok"]
                assert said.get("id") == answer.get("id")
        writer.close()

    with_agent(tmp_path / "s", test)


def test_a_line_that_is_too_long_ends_the_connection(tmp_path: Path) -> None:
    async def test() -> None:
        reader, writer = await asyncio.open_unix_connection(tmp_path / "s")
        writer.write(b"a" * (MAX_LINE + 1))
        said = json.loads(await reader.readline())
        assert said == {"ok": False, "error": f"a line has more than {MAX_LINE} bytes"}
        assert await reader.read() == b""
        writer.close()

    with_agent(tmp_path / "s", test)


def test_too_many_programs(tmp_path: Path) -> None:
    async def test() -> None:
        there = []
        for _ in range(MAX_CLIENTS):
            reader, writer = await asyncio.open_unix_connection(tmp_path / "s")
            writer.write(b'{"do": "echo"}\n')
            assert json.loads(await reader.readline())["ok"]
            there.append(writer)
        reader, writer = await asyncio.open_unix_connection(tmp_path / "s")
        said = json.loads(await reader.readline())
        assert said["error"] == f"{MAX_CLIENTS} programs are connected already"
        assert await reader.read() == b""
        for each in (*there, writer):
            each.close()

    with_agent(tmp_path / "s", test)


def test_a_program_that_does_not_read_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_module, "PATIENCE", 0.05)
    line = json.dumps({"do": "echo", "text": "a" * (MAX_LINE // 2)}).encode() + b"\n"

    async def test() -> None:
        with socket.socket(socket.AF_UNIX) as deaf:
            deaf.connect(str(tmp_path / "s"))
            loop = asyncio.get_running_loop()
            deaf.setblocking(False)
            sent = 0
            with suppress(OSError):
                while sent < 100 * len(line):
                    await loop.sock_sendall(deaf, line)
                    sent += len(line)
            assert sent < 100 * len(line), "the connection ends"
        reader, writer = await asyncio.open_unix_connection(tmp_path / "s")
        writer.write(b'{"do": "echo"}\n')
        assert json.loads(await reader.readline())["ok"], "others are served"
        writer.close()

    with_agent(tmp_path / "s", test)


def test_whose_it_is(tmp_path: Path) -> None:
    async def test() -> None:
        assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600

    with_agent(tmp_path / "s", test)


def test_the_socket_of_a_killed_process_is_taken_over(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "s"))

    async def test() -> None:
        pass

    with_agent(tmp_path / "s", test)


def test_what_is_in_the_way_stays(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "s"))
        other.listen()
        for name, text in (("s", "another process listens"), ("file", "is no socket")):
            with pytest.raises(OSError, match=text):
                asyncio.run(Agent(tmp_path / name, {}).start())
    assert (tmp_path / "file").read_text() == "mine"
