"""The live buffer: what is read is what was appended, whatever happens to the writer."""

from __future__ import annotations

import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_device.data import buffer_source
from fleetlearn_device.data.buffer_format import (
    COUNT_PLACES,
    HEADER_BYTES,
    make_layout,
    read_header,
    slot_of,
    uniform,
    write_header,
)
from fleetlearn_device.data.buffer_source import EmptyBufferError, read_buffer
from fleetlearn_device.data.buffer_writer import BufferWriter
from fleetlearn_device.runtimes.checks import DataError
from fleetlearn_device.training.open_data import open_data
from fleetlearn_protocol.manifest import Input

ROOT = Path(__file__).parents[3]
ARRAYS: dict[str, Any] = {"x": ("float32", (3,)), "y": ("int64", ())}
INPUTS = (Input("x", "float32", (3,)), Input("y", "int64", (), 1000))


def record(number: int) -> dict[str, Any]:
    """The record with this number: what is read can be held against it."""
    return {"x": np.float32([number, number / 2, -number]), "y": np.int64(number % 1000)}


def writer(path: Path, capacity: int = 8, **options: Any) -> BufferWriter:
    return BufferWriter(path, ARRAYS, capacity, **{"seed": 5, **options})


def numbers(path: Path) -> list[int]:
    """The numbers of the records that are there, each checked against what was appended."""
    try:
        rows = read_buffer(path)
    except EmptyBufferError:
        return []
    assert rows.ids is not None
    for row, number in enumerate(rows.ids.tolist()):
        expected = record(number)
        np.testing.assert_array_equal(rows.arrays["x"][row], expected["x"])
        assert rows.arrays["y"][row] == expected["y"]
        assert rows.arrays["time"][row] == 1000.0 + number
    return [int(number) for number in rows.ids]


def append(buffer: BufferWriter, count: int) -> None:
    for _ in range(count):
        number = buffer.count + 1
        assert buffer.append(time=1000.0 + number, **record(number)) == number


def test_the_newest_records_are_read_in_their_order(tmp_path: Path) -> None:
    path = tmp_path / "a.flb"
    with writer(path) as buffer:
        assert numbers(path) == []
        append(buffer, 5)
        assert numbers(path) == [1, 2, 3, 4, 5]
        append(buffer, 6)
    assert numbers(path) == [4, 5, 6, 7, 8, 9, 10, 11]
    with writer(path) as buffer:
        assert buffer.count == 11
        append(buffer, 1)
    assert numbers(path) == [5, 6, 7, 8, 9, 10, 11, 12]
    assert path.stat().st_size == HEADER_BYTES + 8 * 48


def test_the_header_by_hand(tmp_path: Path) -> None:
    layout = make_layout({"x": ("float32", (3, 2)), "on": ("bool", ())}, 10, "reservoir", True, 7)
    content = write_header(layout)
    assert struct.unpack_from("<8sIIQIIIIQ", content) == (
        b"FLBUFFER", 1, 4096, 10, 56, 2, 1, 1, 7,
    )  # fmt: skip
    assert struct.unpack_from("<32s8sI5I", content, 64) == (
        b"x".ljust(32, b"\0"), b"<f4".ljust(8, b"\0"), 2, 3, 2, 0, 0, 0,
    )  # fmt: skip
    assert read_header(content, "here") == layout
    for place in range(COUNT_PLACES[0]):
        damaged = bytearray(content)
        damaged[place] ^= 16
        with pytest.raises(DataError):
            read_header(bytes(damaged), "here")


def test_a_reservoir_is_algorithm_r(tmp_path: Path) -> None:
    with writer(tmp_path / "a.flb", policy="reservoir") as buffer:
        kept: list[int] = []
        for number in range(1, 200):
            append(buffer, 1)
            place = number - 1 if number <= 8 else uniform(5, number)
            if number <= 8:
                kept.append(number)
            elif place < 8:
                kept[place] = number
            assert numbers(tmp_path / "a.flb") == sorted(kept)


def test_a_reservoir_keeps_each_record_with_the_same_probability() -> None:
    capacity, appended, runs = 5, 25, 2000
    kept: Counter[int] = Counter()
    for seed in range(runs):
        layout = make_layout(ARRAYS, capacity, "reservoir", seed=seed)
        places = {slot_of(number, layout): number for number in range(1, appended + 1)}
        kept.update(number for slot, number in places.items() if slot is not None)
    assert sum(kept.values()) == capacity * runs
    expected = runs * capacity / appended
    chi_square = sum((kept[n] - expected) ** 2 / expected for n in range(1, appended + 1))
    # Of 24 degrees of freedom (less: the sum is fixed for each run) 60 is beyond 1 in 10,000.
    assert chi_square < 60


class _CutError(Exception):
    pass


class _Dying(BufferWriter):
    """A writer that dies at a certain byte of all that it writes."""

    left = 10**9

    def _put(self, place: int, content: bytes) -> None:
        super()._put(place, content[: self.left])
        self.left -= len(content)
        if self.left < 0:
            raise _CutError


@pytest.mark.parametrize("policy", ["newest", "reservoir"])
def test_a_writer_that_dies_at_any_byte_leaves_no_torn_record(tmp_path: Path, policy: Any) -> None:
    whole = tmp_path / "whole.flb"
    with writer(whole, 4, policy=policy) as buffer:
        append(buffer, 4)
        while slot_of(buffer.count + 1, buffer.layout) is None:
            append(buffer, 1)
        done = buffer.count
    before = numbers(whole)
    replaced = set(before)
    with writer(whole, 4, policy=policy) as buffer:
        append(buffer, 1)
    after = numbers(whole)
    replaced -= set(after)
    assert len(replaced) == 1
    for left in range(8 + 44 + 12):
        path = tmp_path / f"{left}.flb"
        with writer(path, 4, policy=policy) as buffer:
            append(buffer, done)
        with _Dying(path, ARRAYS, 4, policy=policy, seed=5) as dying:
            dying.left = left
            with pytest.raises(_CutError):
                append(dying, 1)
        found = numbers(path)
        # All but the record whose place was written to; that one may be either or neither.
        assert set(before) - replaced <= set(found) <= set(before) | set(after), left
        with writer(path, 4, policy=policy) as buffer:
            assert buffer.count in (done, done + 1)
            append(buffer, done + 1 - buffer.count)
        assert numbers(path) == after, left
        path.unlink()


def test_torn_bytes_are_never_read(tmp_path: Path) -> None:
    path = tmp_path / "a.flb"
    with writer(path) as buffer:
        append(buffer, 8)
        layout = buffer.layout
    good = path.read_bytes()
    begin = HEADER_BYTES + 2 * layout.record_bytes
    for place in [*range(20), *range(24, 44)]:  # not what is 0, nor what fills the record up
        content = bytearray(good)
        content[begin + place] ^= 1 << place % 8
        path.write_bytes(content)
        assert numbers(path) == [1, 2, 4, 5, 6, 7, 8], place
    # A whole record in another one's place, as a lost write leaves it.
    content = bytearray(good)
    content[begin : begin + 48] = content[begin + 48 : begin + 96]
    path.write_bytes(content)
    assert numbers(path) == [1, 2, 4, 5, 6, 7, 8]
    path.write_bytes(good[: begin + 20])  # a file that was cut
    assert numbers(path) == [1, 2]
    path.write_bytes(good[:100])
    with pytest.raises(DataError, match="is no live buffer"):
        read_buffer(path)


def test_a_check_that_does_not_look_would_be_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail: without the checksum the torn record is read."""
    monkeypatch.setattr(buffer_source, "_is_whole", lambda *_: True)
    path = tmp_path / "a.flb"
    with writer(path) as buffer:
        append(buffer, 8)
    content = bytearray(path.read_bytes())
    content[HEADER_BYTES + 30] ^= 1
    path.write_bytes(content)
    with pytest.raises(AssertionError):
        numbers(path)


def test_records_that_are_too_old_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.flb"
    now = time.time()
    with writer(path) as buffer:
        for age in (100, 50, 10):
            buffer.append(time=now - age, **record(1))
        ids = read_buffer(path, max_age=60).ids
        assert ids is not None
        assert ids.tolist() == [2, 3]
        data = open_data(f"{path}?max_age=60")
        assert data.fit(INPUTS).examples == 2
        buffer.append(time=now, **record(2))
        assert data.fit(INPUTS).examples == 3
        data = open_data(f"{path}?max_age=1")
        for _ in range(8):
            buffer.append(time=now - 100, **record(1))
        with pytest.raises(EmptyBufferError, match="holds no record that is new enough"):
            data.fit(INPUTS)


def test_only_one_process_writes_and_only_its_own_layout(tmp_path: Path) -> None:
    path = tmp_path / "a.flb"
    with writer(path), pytest.raises(DataError, match="another process appends to this buffer"):
        writer(path)
    with pytest.raises(DataError, match=r"is a buffer of 8 records \(newest\).*expected 9 records"):
        writer(path, 9)
    with writer(path, seed=9) as buffer:  # the file's own seed counts
        assert buffer.layout.seed == 5
        with pytest.raises(DataError, match=r"arrays \['x'\] were given; expected \['x', 'y'\]"):
            buffer.append(x=1)
        with pytest.raises(DataError, match=r"array x has dtype float64 and shape \(2,\)"):
            buffer.append(x=np.zeros(2), y=1)
        with pytest.raises(DataError, match="array y has dtype float64"):
            buffer.append(x=np.zeros(3), y=0.5)


@pytest.mark.parametrize(
    ("arrays", "options", "words"),
    [
        ({"x": ("float16", ())}, {}, "has dtype float16; expected one of float32"),
        ({"x" * 32: ("float32", ())}, {}, "expected a name of 1 to 31 bytes"),
        ({"x": ("float32", (0,))}, {}, "each at least 1 long"),
        ({}, {}, "0 arrays were given; expected 1 to 32"),
        (ARRAYS, {"policy": "oldest"}, "policy='oldest'"),
        (ARRAYS, {"capacity": 0}, "capacity=0"),
    ],
)
def test_a_layout_that_is_not_allowed(
    arrays: Any, options: Any, words: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError) as caught:
        BufferWriter(tmp_path / "a.flb", arrays, **{"capacity": 8, **options})
    assert words in str(caught.value)


def test_data_grow_from_task_to_task_and_stay_during_one(tmp_path: Path) -> None:
    path = tmp_path / "a.flb"
    data = open_data(f"buffer:{path}")  # before the program that writes it has begun
    assert data.examples == 0
    with writer(path, 6) as buffer:
        append(buffer, 4)
        data.look()  # type: ignore[attr-defined]
        assert data.examples == 4
        first: Any = data.fit(INPUTS)
        append(buffer, 5)
        assert first.columns[1].tolist() == [1, 2, 3, 4]
        second: Any = data.fit(INPUTS)
        assert second.columns[1].tolist() == [4, 5, 6, 7, 8, 9]
        assert data.fit(INPUTS) is second


@pytest.mark.skipif(not hasattr(os, "fdatasync"), reason="needs fdatasync")
def test_a_durable_record_is_on_the_disk_when_append_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    put = BufferWriter._put
    monkeypatch.setattr(BufferWriter, "_put", lambda *a: (done.append("put"), put(*a))[1])
    monkeypatch.setattr(os, "fdatasync", lambda file: done.append("sync"))
    with writer(tmp_path / "a.flb", durable=True) as buffer:
        append(buffer, 1)
    assert done == ["put", "put", "put", "put", "sync"]


WRITE = """
import sys
sys.path[:0] = [{tests!r}]
from test_buffer import append, writer
from pathlib import Path
with writer(Path(sys.argv[1]), 50, policy=sys.argv[2]) as buffer:
    while True:
        append(buffer, 1)
        print(buffer.count, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["newest", "reservoir"])
def test_killed_writers_lose_no_record_and_tear_none(tmp_path: Path, policy: str) -> None:
    path = tmp_path / "a.flb"
    code = WRITE.format(tests=str(Path(__file__).parent))
    last = 0
    for kill in range(12):
        words = [sys.executable, "-c", code, str(path), policy]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as running:
            assert running.stdout is not None
            for _ in range(40 + 13 * kill):
                last = int(running.stdout.readline())
                if last % 7 == 0:
                    numbers(path)  # while it is being written
            running.send_signal(signal.SIGKILL)
            last = int([str(last), *running.stdout.read().split()][-1])
        found = numbers(path)
        if policy == "newest":
            assert found[-1] >= last
            # The place of one record may be empty: it was to be replaced.
            assert len(found) >= min(last, 50) - 1
        with writer(path, 50, policy=policy) as buffer:
            assert buffer.count >= last


C_PROGRAM = r"""
#include "fleetlearn_buffer.h"
#include <stdio.h>
#include <stdlib.h>
int main(int count, char **words) {
    flb_array arrays[] = {{"x", "<f4", 1, {3}}, {"y", "<i8", 0, {0}}};
    flb_layout layout = {8, atoi(words[2]) ? FLB_RESERVOIR : FLB_NEWEST, 0, 5, 2, arrays};
    if (count > 4) layout.capacity = 9;
    flb_writer *writer;
    int result = flb_open(words[1], &layout, &writer);
    if (result) { puts(flb_error(result)); return -result; }
    for (int i = 0; i < atoi(words[3]); i++) {
        double number = (double)flb_count(writer) + 1;
        float x[3] = {(float)number, (float)(number / 2), (float)-number};
        int64_t y = (int64_t)number % 1000;
        const void *values[] = {x, &y};
        if (flb_append(writer, values, 1000 + number)) return 9;
    }
    printf("%llu\n", (unsigned long long)flb_count(writer));
    flb_close(writer);
    return 0;
}
"""


@pytest.fixture(scope="module")
def c_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("c")
    (folder / "main.c").write_text(C_PROGRAM)
    source = ROOT / "device_sdk" / "c"
    strict = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic", "-O1", "-fsanitize=undefined"]
    files = [str(folder / "main.c"), str(source / "fleetlearn_buffer.c")]
    words = [compiler, *strict, "-fno-sanitize-recover", f"-I{source}", *files, "-o"]
    subprocess.run([*words, str(folder / "append")], check=True, capture_output=True)
    return folder / "append"


@pytest.mark.parametrize("policy", ["newest", "reservoir"])
def test_programs_in_c_and_python_write_the_same_file(
    tmp_path: Path, c_program: Path, policy: Any
) -> None:
    one, other = tmp_path / "c.flb", tmp_path / "python.flb"

    def by_c(path: Path, count: int) -> str:
        words = [str(c_program), str(path), str(int(policy == "reservoir")), str(count)]
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()

    assert by_c(one, 30) == "30"
    with writer(other, policy=policy) as buffer:
        append(buffer, 30)
    assert one.read_bytes() == other.read_bytes()
    # Each goes on where the other ended, after a record whose count was lost too.
    with writer(one, policy=policy) as buffer:
        append(buffer, 3)
    for path in (one, other):
        with path.open("r+b") as file:
            for place in COUNT_PLACES:
                file.seek(place)
                file.write(bytes(8))
    newest = max(numbers(other))
    assert by_c(other, 0) == str(newest)
    with writer(other, policy=policy) as buffer:
        assert buffer.count == newest
        busy = subprocess.run(
            [str(c_program), str(other), "0", "1"], capture_output=True, text=True
        )
    assert "another process appends" in busy.stdout
    words = [str(c_program), str(other), "0", "1", "more"]
    wrong = subprocess.run(words, capture_output=True, text=True)
    assert "the file is another buffer than the layout says" in wrong.stdout
