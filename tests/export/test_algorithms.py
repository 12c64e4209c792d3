"""Local algorithms through graphs/train.onnx on ONNX Runtime, against PyTorch written out here.

The exporter's own check has loops of its own; nothing of it is used in these. Each bundle is
exported once, and trains 20 steps on batches of several sizes, the last of one example.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from by_hand import GraphTraining, largest_difference
from fleetlearn_export import Exported, LocalStep, export_bundle
from fleetlearn_export.model.seeded_random import Seeded
from fleetlearn_protocol.manifest import TRAIN
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

Batch = tuple[Tensor, Tensor]
Tensors = dict[str, Tensor]
Bundles = Callable[[str], Exported]
SIZES = [8, 5, 7, 8, 2, 8, 6, 3, 8, 8, 4, 9, 8, 5, 16, 8, 2, 7, 8, 1]


def mlp() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


class Sensor(nn.Module):
    """Windows (n, 2, 6) -> scores (n, 3) and what is before the head, (n, 4, 6). Its batch norm
    takes one example."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.body = nn.Conv1d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.25)
        self.head = nn.Linear(24, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = torch.tanh(self.norm(self.body(x)))
        return self.head(self.drop(features).flatten(1)), features


class Adapter(nn.Module):
    """W -> W + B A, of rank 2: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language
    Models", arXiv 2106.09685."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.a = nn.Parameter(0.1 * torch.randn(2, weight.shape[1]))
        self.b = nn.Parameter(torch.zeros(weight.shape[0], 2))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.b @ self.a


class Adapted(nn.Module):
    """A frozen transformer encoder over tokens (n, 5), with adapters on weights of attention and
    linear layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.tokens = nn.Embedding(30, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(16, 3)
        for value in self.requires_grad_(False).parameters():
            nn.init.normal_(value, std=0.3)
        for block in self.encoder.layers:
            for module, name in ((block.self_attn, "in_proj_weight"), (block.linear1, "weight")):
                parametrize.register_parametrization(module, name, Adapter(getattr(module, name)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.tokens(x)).mean(1))


class Tied(nn.Module):
    """An autoencoder (n, 6) whose second half is the first's weight, transposed, with one batch
    norm in two places."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.encode = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(3)
        self.decode = nn.Linear(6, 6, bias=False)
        self.decode.weight = self.encode.weight
        self.again = self.norm

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(torch.tanh(self.encode(x)).unflatten(1, (3, 2)))
        return self.decode(self.again(hidden).flatten(1))


def scored(outputs: Any, y: Tensor) -> Tensor:
    return functional.cross_entropy(outputs if isinstance(outputs, Tensor) else outputs[0], y)


def rounded(
    p: Tensors, s: Tensors, b: Tensors, hyper: Tensors, *, objective: Any, anchor: Tensors
) -> Any:
    """Sharpness-aware: the gradient at the point rho up the slope (Foret et al. 2020, arXiv
    2010.01412, Algorithm 1), with Adagrad's sums (Duchi et al. 2011), a pull to the round's model,
    and a rate that falls over the tasks."""
    here = objective(p, b)
    norm = torch.sqrt(torch.stack([(g * g).sum() for g in here.gradients.values()]).sum())
    ahead = objective(
        p | {name: p[name] + hyper["rho"] * g / norm for name, g in here.gradients.items()}, b
    )
    state = {f"sum.{name}": s[f"sum.{name}"] + g * g for name, g in ahead.gradients.items()}
    state |= {
        "steps": s["steps"] + 1,
        "last": ahead.gradients["0.bias"],
        "same": ahead.gradients["0.bias"],
    }
    rate = hyper["lr"] / torch.sqrt(state["steps"])
    moved = {
        name: p[name]
        - rate * (g / torch.sqrt(state[f"sum.{name}"]) + hyper["pull"] * (p[name] - anchor[name]))
        for name, g in ahead.gradients.items()
    }
    return moved, state, {"loss": here.loss}


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    folder = tmp_path_factory.mktemp("algorithms")

    @cache
    def bundle(name: str) -> Exported:
        model, options, loss = mlp(), {}, scored
        x: Tensor = torch.randn(8, 6)
        y: Tensor = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
        match name:
            case "momentum" | "nesterov" | "adam" | "adamw":
                options = {"step": LocalStep(name, weight_decay=True, clip=name == "nesterov")}
            case "near":
                options = {"step": LocalStep(proximal=True, correction=True)}
            case "moon":
                model, x = Sensor(), torch.randn(8, 2, 6)
                options = {
                    "step": LocalStep(contrastive=True),
                    "features": lambda outputs: outputs[1],
                }
            case "own":
                state = {
                    f"sum.{row}": torch.full_like(value, 0.5)
                    for row, value in model.named_parameters()
                }
                state |= {
                    "steps": torch.tensor(3.0),
                    "last": torch.zeros(8),
                    "same": torch.zeros(8),
                }
                options = {"step": rounded, "state": state, "kept": ["sum.*", "steps"]}
                options["hyper"] = {"lr": None, "pull": None, "rho": 0.05}
            case "personal":
                model, x = Sensor(), torch.randn(8, 2, 6)
                options = {"step": LocalStep(proximal=True), "personal": "normalisation"}
            case "lora":
                model, x = Adapted(), torch.randint(30, (8, 5))
            case "tied":
                model, y, loss = Tied(), x, functional.mse_loss
        return export_bundle(model, loss, (x, y), folder / name, **options)

    return bundle


def draw(model: nn.Module, sizes: Sequence[int] = SIZES, seed: int = 1) -> Iterator[Batch]:
    random = torch.Generator().manual_seed(seed)
    for size in sizes:
        if isinstance(model, Adapted):
            x = torch.randint(30, (size, 5), generator=random)
        else:
            x = torch.randn(
                size, *((2, 6) if isinstance(model, Sensor) else (6,)), generator=random
            )
        yield x, x if isinstance(model, Tied) else torch.randint(3, (size,), generator=random)


def train_by_hand(
    model: nn.Module,
    make_optimizer: Callable[..., torch.optim.Optimizer],
    batches: Iterable[Batch],
    *,
    loss: Callable[..., Tensor] = scored,
    penalty: Callable[[], Tensor] | None = None,
    max_norm: float | None = None,
    correction: Tensors | None = None,
    seed: int = 0,
) -> list[float]:
    """Plain PyTorch, on the model itself. Returns each step's loss, without the penalty."""
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    optimizer = make_optimizer(trained.values())
    losses = []
    for number, (x, y) in enumerate(batches):
        with Seeded(torch.tensor(seed + number)):
            value = loss(model(x), y)
        losses.append(float(value.detach()))
        optimizer.zero_grad()
        (value + penalty() if penalty else value).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(trained.values(), max_norm)
        for name, extra in (correction or {}).items():
            trained[name].grad += extra
        optimizer.step()
    return losses


def agree(
    training: GraphTraining, losses: list[float], model: nn.Module, expected: list[float]
) -> None:
    state = {name: value.detach().numpy() for name, value in model.state_dict().items()}
    difference = largest_difference(training.parameters, state)
    print(
        f"parameters {difference:.1e}, losses "
        f"{largest_difference({'': losses}, {'': expected}):.1e}"
    )
    assert difference < 1e-5
    assert losses == pytest.approx(expected, abs=1e-5)


def task(training: GraphTraining, batches: Iterable[Batch]) -> list[float]:
    return [training.step(batch)["loss"] for batch in batches]


def inputs_of(exported: Exported, *kinds: str) -> set[str]:
    graph = onnx.load_model_from_string(exported.bundle.read(TRAIN)).graph
    return {row.name for row in graph.input if row.name.split(".")[0] in kinds}


MLP_ROWS = ["0.weight", "0.bias", "2.weight", "2.bias"]
OPTIMIZERS = {
    "momentum": (partial(torch.optim.SGD, momentum=0.8), {"momentum": 0.8}, ["momentum"]),
    "nesterov": (
        partial(torch.optim.SGD, momentum=0.8, nesterov=True),
        {"momentum": 0.8},
        ["momentum"],
    ),
    "adam": (
        partial(torch.optim.Adam, betas=(0.8, 0.95), eps=1e-6),
        {"beta1": 0.8, "beta2": 0.95, "epsilon": 1e-6},
        ["m", "v"],
    ),
    "adamw": (partial(torch.optim.AdamW, betas=(0.9, 0.999), eps=1e-8), {}, ["m", "v"]),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("momentum", marks=pytest.mark.slow),
        "nesterov",
        "adam",
        pytest.param("adamw", marks=pytest.mark.slow),
    ],
)
def test_optimizers_with_weight_decay(name: str, bundles: Bundles) -> None:
    """Nesterov's gradients are clipped too."""
    make_optimizer, hyper, slots = OPTIMIZERS[name]
    exported, model = bundles(name), mlp()
    lr, clip = (
        (0.02, None) if name.startswith("adam") else (0.3, 0.2 if name == "nesterov" else None)
    )
    hyper = {**hyper, "lr": lr, "weight_decay": 0.1, **({"max_norm": clip} if clip else {})}
    training = GraphTraining(exported.bundle, hyper)
    losses = task(training, draw(model))
    expected = train_by_hand(
        model, partial(make_optimizer, lr=lr, weight_decay=0.1), draw(model), max_norm=clip
    )
    agree(training, losses, model, expected)

    counts = ["t"] if name.startswith("adam") else []
    rows = [*(f"{slot}.{row}" for slot in slots for row in MLP_ROWS), *counts]
    assert list(training.state) == rows
    assert inputs_of(exported, "state") == {f"state.{row}" for row in rows}
    assert inputs_of(exported, "hyper") == {f"hyper.{row}" for row in hyper} | (
        {"hyper.beta1", "hyper.beta2", "hyper.epsilon"} if counts else set()
    )
    assert not inputs_of(exported, "anchor", "correction", "previous", "seed")
    assert counts == [] or float(training.state["t"]) == len(SIZES)


def plain_sgd(lr: float) -> Callable[..., torch.optim.Optimizer]:
    return partial(torch.optim.SGD, lr=lr)


def near(parameters: dict[str, nn.Parameter], anchor: Tensors, mu: float) -> Tensor:
    """mu/2 * ||w - anchor||^2."""
    return (
        mu
        / 2
        * torch.stack([((parameters[name] - anchor[name]) ** 2).sum() for name in anchor]).sum()
    )


def test_fedprox_with_a_drift_correction(bundles: Bundles) -> None:
    model, random = mlp(), torch.Generator().manual_seed(8)
    start = model.state_dict()
    anchor = {
        name: value + 0.2 * torch.randn(value.shape, generator=random)
        for name, value in start.items()
    }
    correction = {
        name: 0.1 * torch.randn(value.shape, generator=random) for name, value in anchor.items()
    }
    training = GraphTraining(
        bundles("near").bundle, {"lr": 0.3, "mu": 0.4}, {"anchor": anchor, "correction": correction}
    )
    losses = task(training, draw(model))
    penalty = partial(near, dict(model.named_parameters()), anchor, 0.4)
    expected = train_by_hand(
        model, plain_sgd(0.3), draw(model), penalty=penalty, correction=correction
    )
    agree(training, losses, model, expected)
    assert inputs_of(bundles("near"), "hyper", "state", "previous", "seed") == {
        "hyper.lr",
        "hyper.mu",
    }


def test_a_proximal_bundle_without_pull_is_plain_sgd(bundles: Bundles) -> None:
    """mu is 0 and the correction 0 unless something else is given: FedAvg from the bundle of
    FedProx and SCAFFOLD."""
    model = mlp()
    training = GraphTraining(bundles("near").bundle, {"lr": 0.3})
    losses = task(training, draw(model))
    expected = train_by_hand(model, plain_sgd(0.3), draw(model))
    assert (
        largest_difference(
            training.parameters, {n: v.numpy() for n, v in model.state_dict().items()}
        )
        < 1e-6
    )
    assert losses == pytest.approx(expected, abs=1e-6)
    pulled = GraphTraining(bundles("near").bundle, {"lr": 0.3, "mu": 0.4})
    task(pulled, draw(model))
    assert largest_difference(pulled.parameters, training.parameters) > 1e-2


def test_ditto_keeps_a_model_of_its_own_near_the_global_one(bundles: Bundles) -> None:
    """Li et al. 2021 (arXiv 2012.04221), Algorithm 1: v_k <- v_k - eta * (grad F_k(v_k) + lambda *
    (v_k - w^t)).

    Two rounds: the device's own model is the graph's parameters, and goes on from where it was; the
    round's model, the anchor, is another each time, and is not changed by it.
    """
    own, model = mlp(), mlp()
    training = GraphTraining(bundles("near").bundle, {"lr": 0.2, "mu": 0.7})
    for number in range(2):
        with torch.no_grad():
            for value in model.parameters():
                value += 0.3  # what the round before came to
        sizes = SIZES[10 * number :][:10]
        anchor = {name: value.detach().clone() for name, value in model.named_parameters()}
        training.references["anchor"] = anchor
        losses = task(training, draw(model, sizes, number))
        expected = []
        for x, y in draw(model, sizes, number):
            loss = scored(own(x), y)
            expected.append(float(loss.detach()))
            gradients = torch.autograd.grad(loss, list(own.parameters()))
            with torch.no_grad():
                for (name, v), gradient in zip(own.named_parameters(), gradients, strict=True):
                    v -= 0.2 * (gradient + 0.7 * (v - anchor[name]))
        agree(training, losses, own, expected)


def test_scaffold_over_two_rounds_of_two_devices(bundles: Bundles) -> None:
    """Karimireddy et al. 2020 (arXiv 1910.06378), Algorithm 1 with option II and eta_g = 1.

    y_i <- y_i - eta_l * (g_i(y_i) - c_i + c); c_i+ = c_i - c + (x - y_i) / (K * eta_l);
    x <- x + mean(y_i - x); c <- c + mean(c_i+ - c_i).
    """
    lr, steps, zero = (
        0.2,
        5,
        {name: torch.zeros_like(value) for name, value in mlp().state_dict().items()},
    )
    bundle = bundles("near").bundle

    def on_the_graph(x: Tensors, correction: Tensors, batches: Iterable[Batch]) -> Tensors:
        training = GraphTraining(bundle, {"lr": lr}, {"correction": correction, "anchor": x})
        training.parameters = {name: value.numpy() for name, value in x.items()}
        task(training, batches)
        return {name: torch.from_numpy(value) for name, value in training.parameters.items()}

    def in_pytorch(x: Tensors, correction: Tensors, batches: Iterable[Batch]) -> Tensors:
        model = mlp()
        model.load_state_dict(x)
        for inputs, y in batches:
            gradients = torch.autograd.grad(scored(model(inputs), y), list(model.parameters()))
            with torch.no_grad():
                for (name, value), gradient in zip(
                    model.named_parameters(), gradients, strict=True
                ):
                    value -= lr * (gradient + correction[name])
        return {name: value.clone() for name, value in model.state_dict().items()}

    def rounds(
        device: Callable[[Tensors, Tensors, Iterable[Batch]], Tensors],
    ) -> tuple[Tensors, Tensors]:
        x, c, own = mlp().state_dict(), zero, [zero, zero]
        for number in range(2):
            ends, controls = [], []
            for k in range(2):
                correction = {name: c[name] - own[k][name] for name in c}
                y = device(x, correction, draw(mlp(), SIZES[k:][:steps], seed=10 * number + k))
                ends.append(y)
                controls.append({n: own[k][n] - c[n] + (x[n] - y[n]) / (steps * lr) for n in c})
            c = {n: c[n] + sum(controls[k][n] - own[k][n] for k in range(2)) / 2 for n in c}
            x, own = {n: (ends[0][n] + ends[1][n]) / 2 for n in c}, controls
        return x, c

    found, expected = rounds(on_the_graph), rounds(in_pytorch)
    assert largest_difference(found[0], expected[0]) < 1e-5
    assert largest_difference(found[1], expected[1]) < 1e-5
    assert max(float(value.abs().max()) for value in expected[1].values()) > 0.05


def test_moon_over_two_rounds(bundles: Bundles) -> None:
    """Li et al. 2021 (arXiv 2103.16257), Algorithm 1: l_con of the features z of the model in
    training, of the global model and of the device's model of the round before, which in the first
    round is the global one.

    Batch norm and dropout are in the model: the other two are evaluated, as what they are.
    """
    exported = bundles("moon")
    manifest = exported.bundle.manifest
    assert (manifest.references, manifest.random, exported.batch_of_one) == (
        ("anchor", "previous"),
        True,
        True,
    )
    mu, temperature, lr = 2.0, 0.4, 0.1
    model = Sensor()
    previous, training = copy.deepcopy(model), GraphTraining(exported.bundle, {})
    before = training.parameters
    similar = []
    for number in range(2):
        anchor = copy.deepcopy(model)
        sizes, seed = SIZES[10 * number :][:10], 100 * number
        round_model = {name: value.numpy().copy() for name, value in model.state_dict().items()}
        training = GraphTraining(
            exported.bundle,
            {"lr": lr, "mu": mu, "temperature": temperature},
            {"anchor": {n: round_model[n] for n in before}, "previous": before},
            seed,
        )
        training.parameters = {name: round_model[name] for name in before}
        losses, expected = task(training, draw(model, sizes, number)), []
        for step, (x, y) in enumerate(draw(model, sizes, number)):
            with torch.no_grad():
                near, far = anchor.eval()(x)[1].flatten(1), previous.eval()(x)[1].flatten(1)
            with Seeded(torch.tensor(seed + step)):
                scores, features = model(x)
            cosines = [
                functional.cosine_similarity(features.flatten(1), z) / temperature
                for z in (near, far)
            ]
            contrast = -torch.log(
                torch.exp(cosines[0]) / (torch.exp(cosines[0]) + torch.exp(cosines[1]))
            ).mean()
            loss = functional.cross_entropy(scores, y)
            expected.append(float(loss.detach()))
            similar.append(float(contrast.detach()))
            gradients = torch.autograd.grad(loss + mu * contrast, list(model.parameters()))
            with torch.no_grad():
                for value, gradient in zip(model.parameters(), gradients, strict=True):
                    value -= lr * gradient
        agree(training, losses, model, expected)
        previous, before = copy.deepcopy(model), training.parameters
        with torch.no_grad():  # the other devices' part of the round's mean
            for value in model.parameters():
                value += 0.1
    assert similar[:10] == pytest.approx([np.log(2)] * 10, abs=1e-6), "both are the global model"
    assert abs(similar[15] - np.log(2)) > 1e-3


def test_dropout_comes_from_the_seed_alone(bundles: Bundles) -> None:
    """The same seed repeats the steps bit for bit; another gives another; mu is 0 here."""
    bundle = bundles("moon").bundle
    batches = list(draw(Sensor(), [8, 5, 1]))
    trained = []
    for seed in (7, 7, 8):
        training = GraphTraining(bundle, {"lr": 0.1, "mu": 0.0}, seed=seed)
        trained.append((task(training, batches), training.parameters))
    assert trained[0][0] == trained[1][0]
    assert all(np.array_equal(value, trained[1][1][name]) for name, value in trained[0][1].items())
    assert trained[0][0][0] != trained[2][0][0]
    model = Sensor()
    expected = train_by_hand(model, plain_sgd(0.1), batches, seed=8)
    assert trained[2][0] == pytest.approx(expected, abs=1e-5)


def test_dropout_has_the_expectation_of_no_dropout(bundles: Bundles) -> None:
    """A linear head behind dropout: over many seeds, what the gradient step does to its bias has
    the mean of the ones drawn by PyTorch's own generator, within four standard errors; and its
    variance is of the same size."""
    model, (batch,) = Sensor(), draw(Sensor(), [4])
    training = GraphTraining(bundles("moon").bundle, {"lr": 1.0, "mu": 0.0})
    start, biases, usual = training.parameters, [], []
    torch.manual_seed(0)
    for _ in range(150):
        training.parameters = start
        training.step(batch)
        biases.append(start["head.bias"] - training.parameters["head.bias"])
        (gradient,) = torch.autograd.grad(scored(model(batch[0]), batch[1]), [model.head.bias])
        usual.append(gradient.numpy())
    found, expected = np.array(biases), np.array(usual)
    error = np.sqrt((found.var(0) + expected.var(0)) / 150)
    assert (np.abs(found.mean(0) - expected.mean(0)) < 4 * error).all()
    assert found.var(0) == pytest.approx(expected.var(0), rel=0.4)


def test_a_step_of_the_users_own(bundles: Bundles) -> None:
    """Sharpness-aware Adagrad with a pull: two gradients a step, state that is not 0 at first and
    outlives the task."""
    exported, model = bundles("own"), mlp()
    manifest = exported.bundle.manifest
    assert manifest.step == LocalStep("custom")
    assert manifest.references == ("anchor",)
    assert {row.name: row.default for row in manifest.hyper} == {
        "lr": None,
        "pull": None,
        "rho": 0.05,
    }
    assert {row.name for row in manifest.state if row.kept} == {
        "steps",
        *(f"sum.{name}" for name in MLP_ROWS),
    }
    anchor = {name: value + 0.1 for name, value in model.state_dict().items()}
    training = GraphTraining(exported.bundle, {"lr": 0.5, "pull": 0.2}, {"anchor": anchor})
    assert float(training.state["steps"]) == 3.0
    losses, expected = task(training, draw(model)), []

    trained = dict(model.named_parameters())
    sums = {name: torch.full_like(value, 0.5) for name, value in trained.items()}
    for number, (x, y) in enumerate(draw(model)):
        loss = scored(model(x), y)
        expected.append(float(loss.detach()))
        first = torch.autograd.grad(loss, list(trained.values()))
        norm = float(torch.cat([gradient.flatten() for gradient in first]).norm())
        ahead = copy.deepcopy(model)
        with torch.no_grad():
            for value, gradient in zip(ahead.parameters(), first, strict=True):
                value += 0.05 * gradient / norm
        second = torch.autograd.grad(scored(ahead(x), y), list(ahead.parameters()))
        for (name, value), gradient in zip(trained.items(), second, strict=True):
            sums[name] += gradient**2
            with torch.no_grad():
                pull = 0.2 * (value - anchor[name])
                value -= 0.5 / (number + 4) ** 0.5 * (gradient / sums[name].sqrt() + pull)
    agree(training, losses, model, expected)
    state = {f"sum.{name}": value for name, value in sums.items()} | {
        "steps": 3.0 + len(SIZES),
        "last": second[1],
    }
    assert largest_difference(training.state, state | {"same": second[1]}) < 1e-5


def test_fedbn_keeps_its_norms_on_the_device(bundles: Bundles) -> None:
    """Li et al. 2021, "FedBN", arXiv 2102.07623: weights and running statistics of batch norm stay.
    They are the table's last rows, have no anchor, and nothing pulls them."""
    exported, model = bundles("personal"), Sensor()
    manifest = exported.bundle.manifest
    norms = ["norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"]
    travelling = ["body.weight", "body.bias", "head.weight", "head.bias"]
    assert [row.name for row in manifest.parameters] == travelling + norms
    assert [row.name for row in manifest.parameters if row.personal] == norms
    assert [row.name for row in manifest.parameters if row.buffer] == norms[2:]
    assert manifest.normalisation == tuple(norms)
    assert manifest.size == 24 + 4 + 72 + 3
    assert manifest.local_size == manifest.size + 16
    assert inputs_of(exported, "anchor") == {f"anchor.{name}" for name in travelling}

    anchor = {name: model.state_dict()[name] + 0.1 for name in travelling}
    training = GraphTraining(exported.bundle, {"lr": 0.2, "mu": 0.5}, {"anchor": anchor})
    losses = task(training, draw(model))
    penalty = partial(near, dict(model.named_parameters()), anchor, 0.5)
    agree(
        training, losses, model, train_by_hand(model, plain_sgd(0.2), draw(model), penalty=penalty)
    )
    assert float(np.abs(training.parameters["norm.running_mean"]).max()) > 0.01


def test_lora_on_a_frozen_transformer(bundles: Bundles) -> None:
    """Only the adapters travel; the frozen weights are constants of the graphs."""
    exported, model = bundles("lora"), Adapted()
    manifest = exported.bundle.manifest
    adapters = {name: value for name, value in model.named_parameters() if value.requires_grad}
    assert {row.name: row.shape for row in manifest.parameters} == {
        n: tuple(v.shape) for n, v in adapters.items()
    }
    assert (
        manifest.size
        == 2 * (16 + 48) + 2 * (16 + 32)
        == sum(value.numel() for value in adapters.values())
    )
    assert exported.frozen == sum(
        value.numel() for value in model.parameters() if not value.requires_grad
    )
    assert exported.frozen > 10 * manifest.size
    assert inputs_of(exported, "param") == {f"param.{name}" for name in adapters}
    graph = onnx.load_model_from_string(exported.bundle.read(TRAIN)).graph
    held = sum(
        int(np.prod(row.dims))
        for row in graph.initializer
        if row.data_type == onnx.TensorProto.FLOAT
    )
    assert exported.frozen - 50 < held < 2 * exported.frozen

    training = GraphTraining(exported.bundle, {"lr": 0.5})
    losses = task(training, draw(model))
    agree(training, losses, model, train_by_hand(model, plain_sgd(0.5), draw(model)))
    assert (
        max(
            float(np.abs(value).max())
            for name, value in training.parameters.items()
            if name.endswith("b")
        )
        > 0.01
    )


def test_tied_weights_are_one_parameter_whose_gradients_add_up(bundles: Bundles) -> None:
    exported, model = bundles("tied"), Tied()
    assert [row.name for row in exported.bundle.manifest.parameters] == [
        *(
            "encode.weight",
            "encode.bias",
            "norm.weight",
            "norm.bias",
            "norm.running_mean",
            "norm.running_var",
        )
    ]
    training = GraphTraining(exported.bundle, {"lr": 0.1})
    losses = task(training, draw(model))
    expected = train_by_hand(model, plain_sgd(0.1), draw(model), loss=functional.mse_loss)
    agree(training, losses, model, expected)
    assert losses[-2] < losses[0]
