"""Which files a module's code is in: what it imports, as far as it is the same person's."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from fleetlearn_protocol import source_files as source
from fleetlearn_protocol.source_files import source_files

PACKAGE = {
    "own_package/__init__.py": "from own_package.rules import clipped",
    "own_package/rules.py": (
        "import numpy\nimport neighbour\nfrom . import sums as s\nfrom .inner.deep import name\n"
    ),
    "own_package/sums.py": "def total(): ...",
    "own_package/unused.py": "",
    "own_package/inner/__init__.py": "",
    "own_package/inner/deep.py": "def look():\n    from ..late import later\n",
    "own_package/late.py": "from own_package import rules",
    "neighbour.py": "import own_package.unused",
}
USED = {"", ".rules", ".sums", ".inner", ".inner.deep", ".late"}


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_what_a_package_s_module_imports_of_the_package(tmp_path: Path) -> None:
    write(tmp_path, PACKAGE)
    rules = tmp_path / "own_package" / "rules.py"
    found = source_files(["own_package.rules"], {"own_package.rules": rules})
    assert {*found} == {f"own_package{name}" for name in USED}
    assert found["own_package.rules"] == rules
    assert found["own_package.inner"] == tmp_path / "own_package" / "inner" / "__init__.py"


def test_neighbours_count_where_their_folder_is_given(tmp_path: Path) -> None:
    write(tmp_path, PACKAGE)
    found = source_files(["own_package.rules"], {}, [tmp_path])
    assert {*found} == {"neighbour", "own_package.unused", *(f"own_package{name}" for name in USED)}


def test_a_namespace_s_parts_are_looked_for_in_its_folder(tmp_path: Path) -> None:
    write(tmp_path, {"acme/rules.py": "from acme import sums", "acme/sums.py": "", "b.py": ""})
    found = source_files(["acme.rules"], {"acme.rules": tmp_path / "acme" / "rules.py"})
    assert {*found} == {"acme.rules", "acme.sums"}


def test_modules_that_are_no_source(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": "import b, c", "b.abi3.so": "\0", "c.pyc": "\0"})
    found = source_files(["a"], {}, [tmp_path])
    assert [file.name for file in found.values()] == ["a.py", "b.abi3.so", "c.pyc"]


def test_what_is_no_python_is_counted_and_not_read(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": "import b\nfrom .....far import c\nfrom . import d", "b.py": "def ("})
    assert {*source_files(["a"], {}, [tmp_path])} == {"a", "b"}


def test_a_large_package_ends_somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 100
    chain = {f"own/m{n}.py": f"from . import m{n + 1}\n" + "x = 1\n" * 200 for n in range(count)}
    write(tmp_path, {"own/__init__.py": "", **chain})
    begun = time.perf_counter()
    assert len(source_files(["own.m0"], {}, [tmp_path])) == count + 1
    print(f"{count} modules: {time.perf_counter() - begun:.2f} s")
    monkeypatch.setattr(source, "MOST", 40)
    assert len(source_files(["own.m0"], {}, [tmp_path])) in (40, 41)
