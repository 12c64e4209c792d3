"""What docs/start/your-own-model.md tells a reader to type, typed."""

from __future__ import annotations

import functools
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import typed
from fleetlearn_coordinator import Plan
from fleetlearn_coordinator.plan.personal_parameters import personal_misfit
from fleetlearn_export import ExportError, LocalStep, export_bundle
from fleetlearn_protocol import open_bundle
from processes import ROOT, free_port
from torch import nn
from torch.nn import functional

PAGE = (ROOT / "docs" / "start" / "your-own-model.md").read_text()
SECTIONS = typed.sections(PAGE)
X, Y = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3


def section(number: int) -> list[typed.Command]:
    (found,) = (commands for title, commands in SECTIONS.items() if title.startswith(f"{number}. "))
    return found


class Guide:
    """A reader's folder with the page's files in it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        typed.write_files(PAGE, folder, self.port)

    def type_in(self, number: int) -> None:
        check = functools.partial(typed.assert_shown, folder=self.folder)
        typed.type_in(section(number), self.folder, self.port, check)

    def plan_fits(self, name: str) -> Plan:
        plan = Plan.load(self.folder / name)
        plan.check_against(open_bundle(plan.bundle).manifest)
        return plan


@pytest.fixture(scope="module")
def guide(tmp_path_factory: pytest.TempPathFactory) -> Guide:
    """The first two sections: data, the export, and two that are refused."""
    made = Guide(tmp_path_factory.mktemp("guide"))
    made.type_in(1)
    made.type_in(2)
    return made


@pytest.mark.slow
def test_it_trains_alone_and_with_a_coordinator_and_is_used(guide: Guide) -> None:
    guide.type_in(3)
    held_out = np.load(guide.folder / "held-out.npz")
    for name in ("infer.onnx", "infer.int8.onnx"):
        session = onnxruntime.InferenceSession(
            str(guide.folder / name), providers=["CPUExecutionProvider"]
        )
        (outputs,) = session.run(None, {"x": held_out["x"]})
        assert (np.asarray(outputs).argmax(1) == held_out["y"]).mean() > 0.9, name
    assert not (guide.folder / "broken.bundle").exists()


@pytest.mark.slow
def test_the_summary_has_the_model_s_numbers(guide: Guide) -> None:
    """Numbers are left out where the page is compared with what is printed."""
    manifest = open_bundle(guide.folder / "my.bundle").manifest
    trained = sum(int(np.prod(row.shape)) for row in manifest.parameters if not row.buffer)
    assert f"│ parameters       │ {trained:,} in 10 tensors, trained" in PAGE
    assert f"│ bytes per round  │ {4 * manifest.size:,} down" in PAGE


@pytest.mark.slow
def test_a_step_of_one_s_own(guide: Guide) -> None:
    guide.type_in(4)
    plan = guide.plan_fits("sam.toml")
    assert plan.hyper(open_bundle(plan.bundle).manifest) == {"lr": 0.02, "rho": 0.1}


@pytest.mark.slow
def test_adapters_and_personal_parameters(guide: Guide) -> None:
    guide.type_in(5)
    names = [row.name for row in open_bundle(guide.folder / "lora.bundle").manifest.parameters]
    assert len([name for name in names if name.endswith((".up", ".down"))]) == 8
    assert set(names) >= {"head.weight", "head.bias"}
    manifest = open_bundle(guide.folder / "fedbn.bundle").manifest
    assert personal_misfit("recipe fedbn", "normalisation", manifest) is None
    personal = [row.name for row in manifest.parameters if row.personal]
    assert len(personal) == 8
    assert all(name.startswith(("body.1.", "body.5.")) for name in personal)


@pytest.mark.slow
def test_several_inputs(guide: Guide) -> None:
    guide.type_in(6)
    guide.plan_fits("moon.toml")


def test_every_section_is_typed() -> None:
    assert [number for number in range(1, 8) if section(number)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("printed", "status"),
    [
        ("parameters 3 trained\n", 0),
        ("parameters 3 frozen\nloss 0.2\n", 0),
        ("parameters 3 trained\nloss 0.2\n", 1),
    ],
)
def test_what_is_printed_otherwise_is_noticed(printed: str, status: int, tmp_path: Path) -> None:
    command = typed.Command("true", "│ parameters │ 2,500 trained │\n...\nloss 0.1\n")
    typed.assert_shown(command, "parameters 3\ntrained\nand so on\nloss 0.25\n", 0, tmp_path)
    with pytest.raises(AssertionError):
        typed.assert_shown(command, printed, status, tmp_path)


class WithLabels(nn.Module):
    """Is given labels, and returns no loss of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.layer(x)}


class Applied(nn.Module):
    """A linear layer, put to use by a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(6, 3), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.layer, x)  # type: ignore[no-any-return]


class Scaled(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.scale * outputs, y)


def in_bfloat16(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return layer(x).float()


def centred(layer: Any, x: torch.Tensor) -> torch.Tensor:
    layer.mean = 0.9 * getattr(layer, "mean", torch.zeros(6)) + 0.1 * x.mean(0)
    return layer(x - layer.mean)  # type: ignore[no-any-return]


def clipped(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        layer.bias.clamp_(-0.01, 0.01)
    return layer(x)  # type: ignore[no-any-return]


def with_slope(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    x = x.requires_grad_()
    return layer(x) + torch.autograd.grad(layer(x).sum(), x, create_graph=True)[0][:, :3]  # type: ignore[no-any-return]


def refused(words: str) -> dict[str, Any]:
    """Arguments of an export that the page's row speaks of."""
    given: dict[str, Any] = {
        "model": nn.Linear(6, 3),
        "loss": functional.cross_entropy,
        "example": (X, Y),
    }
    if words.startswith("control flow"):
        given["model"] = Applied(lambda layer, x: layer(x) if x.sum() > 0 else layer(-x))
    elif words.startswith("the number of examples"):
        given["model"] = Applied(lambda layer, x: layer(x) / int(x.shape[0]))
    elif words.startswith("the number n of examples"):
        given["model"] = Applied(lambda layer, x: torch.cat([layer(row) for row in x.split(32)]))
    elif words.startswith("has no counterpart"):
        given["model"] = Applied(lambda layer, x: layer(x - x.mode(1, keepdim=True).values))
    elif words.startswith("gets a gradient on"):
        given["model"] = Applied(
            lambda layer, x: layer(x) if len(x) % 2 else functional.linear(x, layer.weight)
        )
    elif words.startswith("trained parameters"):
        given |= {"model": nn.Linear(6, 3).double(), "example": (X.double(), Y)}
    elif words.startswith("expected a scalar"):
        given["loss"] = nn.CrossEntropyLoss(reduction="none")
    elif words.startswith("loss= was not given"):
        del given["loss"]
        given["model"] = WithLabels()
    elif words == "it is a sum":
        given["loss"] = nn.CrossEntropyLoss(reduction="sum")
    elif words.startswith("no output"):
        given |= {
            "model": Applied(lambda layer, x: layer(x).mean(0)),
            "loss": lambda outputs, y: outputs.mean(),
        }
    elif words.startswith("is the class"):
        given["loss"] = nn.CrossEntropyLoss
    elif words.startswith("the step is torch.optim's"):
        given["step"] = torch.optim.SGD
    elif words.startswith("is wrapped in"):
        given["model"] = nn.DataParallel(nn.Linear(6, 3))
    elif words.startswith("computes under"):
        given["model"] = Applied(in_bfloat16)
    elif words.startswith("a plain tensor attribute"):
        given["model"] = Applied(centred)
    elif words.startswith("forward writes into"):
        given["model"] = Applied(clipped)
        given["model"].layer.bias.requires_grad_(False)
    elif words.startswith("torch.cond"):
        given["model"] = Applied(
            lambda layer, x: torch.cond(x.sum() > 0, layer, lambda x: layer(-x), (x,))
        )
    elif words.startswith("differentiates"):
        given["model"] = Applied(with_slope)
    elif words.startswith("holds nan"):
        given["example"] = (X.masked_fill(X > 0, torch.nan), Y)
    elif words.startswith("is float64"):
        given["example"] = (X.double(), Y)
    elif words.startswith("has a parameter of its own"):
        given["loss"] = Scaled()
    elif words.startswith("depends on a parameter"):
        given["loss"] = Scaled().forward
    elif words.startswith("is read"):
        layer = nn.Linear(6, 3)
        kept = [layer.weight]
        given |= {
            "model": layer,
            "loss": lambda z, y: functional.cross_entropy(z, y) + kept[0].square().sum(),
        }
    elif words == "share memory":
        given["model"] = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        given["model"][1].weight.data = given["model"][0].weight.data
    elif words.startswith("draws"):
        given["model"] = Applied(lambda layer, x: layer(x) * random.uniform(0.8, 1.2))
    elif words.startswith("gives another result"):
        calls: list[int] = []
        given["model"] = Applied(lambda layer, x: (calls.append(1), layer(x) * len(calls))[1])
    elif words.startswith("register_post"):
        given["model"].weight.register_post_accumulate_grad_hook(lambda value: value.grad.mul_(0.5))
    elif words.startswith("a counter"):
        given["model"] = nn.Sequential(nn.BatchNorm1d(6, momentum=None), nn.Linear(6, 3))
    elif words.startswith("has no shape"):
        given["model"] = nn.LazyLinear(3)
    elif words.startswith("a step is"):
        given["step"] = LocalStep(proximal=True, contrastive=True)
    return given


ROWS = re.findall(r"^\| (.*?) \|", PAGE.split("## 7. ")[1], re.MULTILINE)[1:]


@pytest.mark.parametrize("words", ROWS)
def test_what_the_page_says_is_refused_is_refused(words: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError) as error:
        export_bundle(**refused(words), path=tmp_path / "a.bundle")
    assert re.search(".*".join(map(re.escape, words.split("..."))), str(error.value)), error.value
