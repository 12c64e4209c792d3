"""The cache of exported bundles: the same arguments are exported once, others are not mistaken for
them."""

from __future__ import annotations

import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from bundle_cache import BundleCache, fingerprint
from fleetlearn_export import Exported, LocalStep
from line_bundle import write_line_bundle
from torch import nn
from torch.nn import functional


class Exporter:
    """Stands for ``export_bundle``: writes the same bundle for whatever it is given, and counts."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def __call__(self, model: Any, loss: Any, example: Any, path: Path, **options: Any) -> Exported:
        with self.log.open("a") as file:
            file.write("exported\n")
        return Exported(
            write_line_bundle(path),
            1e-7,
            True,
            "no training build",
            3,
            {},
            None,
            None,
            without_gradient=("unused",),
        )

    @property
    def count(self) -> int:
        return len(self.log.read_text().splitlines())


EXAMPLE = torch.ones(2, 3), torch.zeros(2, 1)


def model(value: float = 0.5) -> nn.Module:
    made = nn.Sequential(nn.Linear(3, 1))
    nn.init.constant_(made[0].weight, value)
    nn.init.zeros_(made[0].bias)
    return made


def key(*values: object) -> str:
    return "\n".join(fingerprint(values))


def test_equal_arguments_are_exported_once_and_each_caller_has_its_own_copy(tmp_path: Path) -> None:
    exporter = Exporter(tmp_path / "log")
    cache = BundleCache(tmp_path / "cache", exporter)
    for number, folder in enumerate(("one", "two", "three")):
        (tmp_path / folder).mkdir()
        made = cache.export(
            model(), functional.mse_loss, EXAMPLE, tmp_path / folder / "a.bundle", step=LocalStep()
        )
        checks = (1e-7, True, "no training build", 3, {})
        assert made[1:] == (*checks, None, None, ("unused",), {}, None)
        assert made.bundle.path == tmp_path / folder / "a.bundle"
        assert made.bundle.parameters().size == 5
        (made.bundle.path / "manifest.json").write_text("damaged by a test")
        assert exporter.count == 1, number
    cache.export(
        model(0.25), functional.mse_loss, EXAMPLE, tmp_path / "one" / "b.bundle", step=LocalStep()
    )
    assert exporter.count == 2


def test_what_changes_a_bundle_changes_its_key() -> None:
    class Tied(nn.Module):
        def __init__(self, tied: bool) -> None:
            super().__init__()
            self.a, self.b = model(), model()
            if tied:
                self.b[0].weight = self.a[0].weight

    class Heads(nn.Linear):
        def __init__(self, heads: int) -> None:
            super().__init__(3, 1)
            self.heads = heads
            nn.init.zeros_(self.weight)
            nn.init.zeros_(self.bias)

    def scaled(factor: float) -> Any:
        return lambda outputs, y: factor * (outputs - y).mean()

    frozen = model().requires_grad_(False)
    values = [
        *(
            model(),
            model(0.25),
            model().eval(),
            frozen,
            Tied(False),
            Tied(True),
            Heads(1),
            Heads(2),
        ),
        *(scaled(1.0), scaled(2.0), functional.mse_loss, functional.l1_loss),
        *(
            LocalStep(),
            LocalStep(proximal=True),
            torch.ones(2),
            torch.ones(2, 1),
            torch.ones(2).int(),
        ),
        *({"lr": None}, {"lr": 0.1}, ["a", "b"], ["ab"], None, "None"),
    ]
    assert len({key(value) for value in values}) == len(values)
    assert key(model(), scaled(1.0), Tied(True), Heads(2)) == key(
        model(), scaled(1.0), Tied(True), Heads(2)
    )
    with pytest.raises(TypeError, match="no key of a cached bundle can be made"):
        key(object())


def test_what_was_not_used_for_the_longest_time_goes_first(tmp_path: Path) -> None:
    exporter = Exporter(tmp_path / "log")
    cache = BundleCache(tmp_path / "cache", exporter)

    def export(value: float, name: str) -> None:
        cache.export(model(value), functional.mse_loss, EXAMPLE, tmp_path / name, name="line")

    export(1.0, "first")
    size = sum(file.stat().st_size for file in (tmp_path / "cache").rglob("*") if file.is_file())
    cache.limit = 5 * size // 2  # room for two
    export(2.0, "second")
    export(1.0, "first again")
    export(3.0, "third")
    assert exporter.count == 3
    export(1.0, "still there")
    export(3.0, "this too")
    assert exporter.count == 3
    export(2.0, "had to go")
    assert exporter.count == 4


def export_at_once(folder: Path, number: int, barrier: Any) -> None:
    cache = BundleCache(folder / "cache", Exporter(folder / "log"))
    barrier.wait(60)
    assert (
        cache.export(
            model(), functional.mse_loss, EXAMPLE, folder / f"{number}.bundle", name="line"
        ).frozen
        == 3
    )


def test_two_at_once_export_once(tmp_path: Path) -> None:
    barrier = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(export_at_once, tmp_path, number, barrier) for number in range(2)]
        assert [future.result(60) for future in running] == [None, None]
    assert Exporter(tmp_path / "log").count == 1


@pytest.mark.slow
def test_two_processes_at_once_export_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    running = [
        context.Process(target=export_at_once, args=(tmp_path, number, barrier))
        for number in range(2)
    ]
    for process in running:
        process.start()
    for process in running:
        process.join(120)
    assert [process.exitcode for process in running] == [0, 0]
    assert Exporter(tmp_path / "log").count == 1


def test_a_draft_that_a_killed_process_left_is_made_again(tmp_path: Path) -> None:
    exporter = Exporter(tmp_path / "log")
    cache = BundleCache(tmp_path / "cache", exporter)
    cache.export(model(), functional.mse_loss, EXAMPLE, tmp_path / "a", name="line")
    (entry,) = (row for row in (tmp_path / "cache").iterdir() if row.is_dir())
    entry.rename(entry.with_name(entry.name + ".part"))
    (entry.with_name(entry.name + ".part") / "exported.json").unlink()
    assert (
        cache.export(model(), functional.mse_loss, EXAMPLE, tmp_path / "b", name="line").frozen == 3
    )
    assert exporter.count == 2
