"""Where own algorithms come from: versions of packages however they are installed, and a digest of
all the source that they use."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from zipfile import ZipFile

import pytest
from fleetlearn_protocol import extensions
from fleetlearn_protocol.extensions import ExtensionPoint
from fleetlearn_protocol.origins import Origin, origin, used_files

NUMBER = ExtensionPoint("lucky number", int)
WHERE = "section.key"
RULES = "from lucky_package.sums import seven\ndef plain(): return seven\n"
FILES = {
    "lucky_package/__init__.py": "",
    "lucky_package/rules.py": RULES,
    "lucky_package/sums.py": "seven = 7",
    "lucky_package/unused.py": "",
    "lucky_alone.py": "from lucky_package.rules import plain\ndef eight(): return 8\n",
}
NAME = "lucky_package.rules:plain"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that modules are imported from, as installed ones are."""
    write(tmp_path, FILES)
    monkeypatch.syspath_prepend(tmp_path)
    with extensions.apart():
        yield tmp_path
    forget()


def forget() -> None:
    for name in [name for name in sys.modules if name.startswith("lucky_")]:
        del sys.modules[name]


def write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def install(folder: Path, version: str, files: Mapping[str, str], name: str = "lucky-dist") -> Path:
    """Write what an installer writes of a distribution. ``files``: of its folder."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    write(info, {"METADATA": metadata, **files})
    return info


def record(*files: str) -> dict[str, str]:
    return {"RECORD": "".join(f"{file},sha256=abc,1\n" for file in files)}


def where(name: str, listed: str = "lucky_package") -> Origin:
    extensions.allow([listed])
    return origin(NUMBER, name, WHERE)


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_a_single_file_is_its_own_digest(folder: Path) -> None:
    (folder / "lucky_alone.py").write_text("def eight(): return 8\n")
    found = where("lucky_alone:eight", "lucky_alone")
    assert found == ("lucky_alone:eight", "", sha256("def eight(): return 8\n")[:16])
    assert str(found) == f"lucky_alone:eight {found.source}"


def test_all_that_it_uses_of_its_package_counts(folder: Path) -> None:
    first = where(NAME)
    rows = [
        f"{sha256('')}  lucky_package\n",
        f"{sha256(RULES)}  lucky_package.rules\n",
        f"{sha256('seven = 7')}  lucky_package.sums\n",
    ]
    assert first.source == sha256("".join(rows))[:16]
    write(folder, {"lucky_package/unused.py": "def other(): ..."})
    assert where(NAME) == first
    write(folder, {"lucky_package/sums.py": "seven = 77"})
    second = where(NAME)
    assert second.source != first.source, "a module that it imports is another"
    write(folder, {"lucky_package/__init__.py": "import warnings"})
    assert where(NAME).source != second.source, "and so is its package's own file"
    (folder / "lucky_package" / "sums.py").unlink()
    assert where(NAME).source not in (first.source, second.source)


def test_neighbours_in_the_listed_folder_count(folder: Path) -> None:
    write(folder, {"lucky_alone.py": "import lucky_beside\ndef eight(): return 8\n"})
    write(folder, {"lucky_beside.py": "first = 1"})
    name = "lucky_alone:eight"
    assert {*used_files_of(name)} == {"lucky_alone"}, "installed modules have other owners"
    extensions.allow([], folder)
    assert {*used_files_of(name)} == {"lucky_alone", "lucky_beside"}
    before = where(name, "lucky_alone")
    write(folder, {"lucky_beside.py": "first = 11"})
    assert where(name, "lucky_alone").source != before.source


def used_files_of(name: str) -> dict[str, Path]:
    extensions.allow([name.partition(":")[0]])
    return used_files(NUMBER, name, WHERE)


def test_a_function_with_numbers_of_another_module_has_the_source_of_both(folder: Path) -> None:
    write(
        folder,
        {
            "lucky_alone.py": (
                "from functools import partial\nfrom lucky_package.rules import plain\n"
                "thrice = partial(plain)\n"
            )
        },
    )
    extensions.allow(["lucky_package"])
    assert {"lucky_alone", "lucky_package.rules", "lucky_package.sums"} < {
        *used_files_of("lucky_alone:thrice")
    }


def test_the_version_is_that_of_the_distribution_which_has_the_file(folder: Path) -> None:
    install(folder, "1.2.3", record("lucky_package/rules.py", "lucky_package/sums.py"))
    install(folder, "4.5", record("lucky_alone.py"), name="lucky-other")
    assert where(NAME).version == "1.2.3"
    assert where("lucky_alone:eight", "lucky_alone").version == "4.5"
    assert str(where(NAME)).startswith(f"{NAME} 1.2.3 ")


def test_an_entry_point_has_the_version_too(folder: Path) -> None:
    points = "[fleetlearn.lucky-number]\nseven = lucky_package.rules:plain\n"
    install(
        folder,
        "1.2.3",
        {**record("lucky_package/rules.py"), "entry_points.txt": points},
    )
    found = where("seven")
    assert (found.name, found.version) == ("seven", "1.2.3")
    assert found.source == where(NAME).source


def test_parts_of_a_namespace_have_versions_of_their_own(folder: Path) -> None:
    write(folder, {"lucky_space/a.py": "def plain(): return 1"})
    write(folder, {"lucky_space/b.py": "def plain(): return 2"})
    install(folder, "1", record("lucky_space/a.py"), name="lucky-a")
    install(folder, "2", record("lucky_space/b.py"), name="lucky-b")
    extensions.allow(["lucky_space.a"])
    assert where("lucky_space.a:plain", "lucky_space.a").version == "1"
    assert where("lucky_space.b:plain", "lucky_space.b").version == "2"


def test_a_file_that_hides_the_installed_module_has_no_version(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(folder, "1.2.3", record("lucky_package/rules.py"))
    before = tmp_path_factory.mktemp("before")
    write(before, FILES)
    monkeypatch.syspath_prepend(before)
    assert where(NAME).version == ""


@pytest.mark.parametrize("editable", [True, False])
def test_a_package_that_is_used_in_place(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, editable: bool
) -> None:
    """pip install --editable: its list of files has none of its modules."""
    installed = tmp_path_factory.mktemp("site packages")
    url = {"url": folder.as_uri(), "dir_info": {"editable": True} if editable else {}}
    made = install(installed, "1.3.dev1", record("_lucky.pth"))
    (made / "direct_url.json").write_text(json.dumps(url))
    other = install(installed, "9", record("_other.pth"), name="lucky-above")
    above = {"url": folder.parent.as_uri(), "dir_info": {"editable": True}}
    (other / "direct_url.json").write_text(json.dumps(above))
    install(installed, "8", {"direct_url.json": "not JSON"}, name="lucky-broken")
    sys.path.append(str(installed))  # ``folder`` puts it back
    assert where(NAME).version == ("1.3.dev1" if editable else "9")


def test_distributions_without_a_list_of_files(folder: Path) -> None:
    install(folder, "1.2.3", {"top_level.txt": "lucky_package\n"})
    assert where(NAME).version == "1.2.3"
    assert where("lucky_alone:eight", "lucky_alone").version == ""


def test_a_module_in_an_archive(folder: Path) -> None:
    archive = folder / "lucky.whl"

    def pack(seven: str) -> Origin:
        with ZipFile(archive, "w") as file:
            file.writestr("lucky_packed/__init__.py", "")
            file.writestr("lucky_packed/rules.py", "from lucky_packed.sums import plain as p\n")
            file.writestr("lucky_packed/sums.py", f"def plain(): return {seven}")
            file.writestr(
                "lucky_packed-3.1.dist-info/METADATA",
                "Metadata-Version: 2.1\nName: lucky-packed\nVersion: 3.1\n",
            )
            file.writestr("lucky_packed-3.1.dist-info/RECORD", "lucky_packed/sums.py,,\n")
        extensions.allow(["lucky_packed"], archive)
        assert extensions.make(NUMBER, "lucky_packed.sums:plain", {}, WHERE) == 7
        return origin(NUMBER, "lucky_packed.sums:plain", WHERE)

    first = pack("7")
    assert first == (
        "lucky_packed.sums:plain",
        "3.1",
        hashlib.sha256(archive.read_bytes()).hexdigest()[:16],
    )
    assert pack("7 + 0 * 1").source != first.source


def test_what_was_typed_has_no_file() -> None:
    def seven() -> int:
        return 7

    with extensions.apart():
        extensions.register(NUMBER, "seven", seven)
        assert where("seven", "json").source, "this file"
        seven.__module__ = "lucky_nowhere"
        assert origin(NUMBER, "seven", WHERE) == ("seven", "", "")
