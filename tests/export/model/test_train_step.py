"""What a local step may be, and what it may not."""

from __future__ import annotations

import linecache
from typing import Any

import pytest
import torch
from fleetlearn_export import ExportError, LocalStep, export_bundle
from fleetlearn_export.model.checked_user_model import make_user_model
from fleetlearn_export.model.train_step import (
    TrainStep,
    changed_buffers,
    make_train_step,
    names_matching,
)
from fleetlearn_export.model.user_model import UserModel, training_mode
from fleetlearn_export.tracing.trace import trace
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

X, Y = torch.randn(4, 6), torch.tensor([0, 1, 2, 0])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.body = nn.Linear(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(torch.tanh(self.body(x))))


def accuracy(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs.argmax(1) == y).float()


def source_of(model: nn.Module | None = None, **options: Any) -> UserModel:
    arguments: dict[str, Any] = {
        "metrics": {"accuracy": accuracy},
        "names": None,
        "targets": 1,
    } | options
    return make_user_model(model or Net(), functional.cross_entropy, (X, Y), **arguments)


def made(step: Any = None, model: nn.Module | None = None, **options: Any) -> TrainStep:
    user = source_of(model)
    with training_mode(user.model):
        return make_train_step(user, step or LocalStep(), **options)


def sgd(params: Any, state: Any, batch: Any, hyper: Any, *, objective: Any) -> Any:
    found = objective(params, batch)
    moved = {
        name: params[name] - hyper["lr"] * gradient for name, gradient in found.gradients.items()
    }
    return params | found.buffers | moved, state, {"loss": found.loss, **found.metrics}


def own(
    change: Any = lambda params, state, metrics: (params, state, metrics), **options: Any
) -> TrainStep:
    """SGD as a step of one's own, its three results changed."""

    def step(params: Any, state: Any, batch: Any, hyper: Any, *, objective: Any) -> Any:
        return change(*sgd(params, state, batch, hyper, objective=objective))

    return made(step, **{"hyper": {"lr": None}, **options})


def test_inputs_and_outputs_in_the_graphs_order() -> None:
    step = made(LocalStep("momentum", proximal=True, correction=True), personal=["head"])
    rows = [
        "body.weight",
        "body.bias",
        "norm.weight",
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
    ]
    heads = ["head.weight", "head.bias"]
    trained = rows[:4] + heads
    assert list(step.values) == [*rows, *heads]
    assert step.travelling == rows
    assert (step.personal, step.buffers, step.random) == (set(heads), set(rows[4:]), False)
    assert step.references == ("anchor", "correction")
    arguments = step.arguments()
    assert list(arguments) == [
        *(f"param.{name}" for name in (*rows, *heads)),
        *(f"anchor.{name}" for name in rows),
        *(f"correction.{name}" for name in rows),
        *(f"state.momentum.{name}" for name in trained),
        *("batch.x", "batch.y", "hyper.lr", "hyper.mu", "hyper.momentum"),
    ]
    assert len({value.data_ptr() for value in arguments.values()}) == len(arguments), (
        "each has its own memory"
    )
    with training_mode(step.objective.model):
        results = step.run(arguments)
    assert list(results) == step.outputs()
    assert list(results)[len(step.values) :] == [
        *(f"next.state.momentum.{name}" for name in trained),
        *("loss", "metric.accuracy"),
    ]


def test_all_normalisation_layers_are_personal() -> None:
    step = made(personal="normalisation")
    norms = ["norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"]
    assert list(step.values)[4:] == norms
    assert step.personal == step.normalisation == set(norms)
    with pytest.raises(
        ExportError,
        match=r"personal='normalisation': the model has no normalisation layer of PyTorch",
    ):
        made(model=nn.Linear(6, 3), personal="normalisation")
    assert made(personal=["head"]).normalisation == set(norms)


def test_making_a_step_leaves_the_model_as_it_was() -> None:
    user = source_of()
    before = {name: value.detach().clone() for name, value in user.model.state_dict().items()}
    with training_mode(user.model):
        step = make_train_step(user, LocalStep(contrastive=True), features=lambda outputs: outputs)
        step.run(step.arguments())
        assert all(module.training for module in user.model.modules())
        assert all(
            torch.equal(value, before[name]) for name, value in user.model.state_dict().items()
        )
    assert all(value.grad is None for value in user.model.parameters())


HYPER = {"hyper": {"lr": None}}


@pytest.mark.parametrize(
    ("step", "options", "text"),
    [
        ("sgd", {}, r"the step is the text 'sgd'; expected LocalStep\('sgd'\)"),
        (3, {}, "the step is a int; expected a LocalStep or a function"),
        (LocalStep, {}, r"the step is the class LocalStep; .* write LocalStep\(\.\.\.\)"),
        (
            torch.optim.SGD,
            {},
            (
                r"the step is torch\.optim's SGD; expected LocalStep\(\"sgd\"\): a device has no "
                r"PyTorch"
            ),
        ),
        (
            torch.optim.SGD([torch.zeros(1, requires_grad=True)]),
            {},
            r"torch\.optim's SGD; expected LocalStep",
        ),
        (torch.optim.Rprop, {}, r"torch\.optim's Rprop; expected LocalStep, of sgd, momentum"),
        (
            LocalStep("lion"),
            {},
            "optimizer 'lion'; a LocalStep has one of sgd, momentum, nesterov, adam, adamw$",
        ),
        (LocalStep("custom"), {}, "optimizer 'custom'; a LocalStep has one of sgd"),
        (
            LocalStep(proximal=True, contrastive=True),
            {"features": torch.relu},
            (
                "a step is proximal or contrastive, not both: each has its own mu; write the two "
                "as a function"
            ),
        ),
        (
            LocalStep(contrastive=True),
            {},
            r"a contrastive step needs features\(outputs\), the tensor of features",
        ),
        (
            LocalStep(),
            {"features": torch.relu},
            r"features are for a contrastive step: LocalStep\(contrastive=True\)",
        ),
        (
            sgd,
            {**HYPER, "features": torch.relu},
            r"features are for LocalStep\(contrastive=True\); a step of your own",
        ),
        (
            LocalStep(contrastive=True),
            {"features": lambda outputs: outputs["z"]},
            (
                r"on the example the step fails in PyTorch itself: .* at .*test_train_step.py:\d+ "
                r"in <lambda>"
            ),
        ),
        (
            LocalStep("adam"),
            {"state": {"t": 0.0}},
            "state and kept are for a step of your own; a LocalStep's",
        ),
        (LocalStep("adam"), {"kept": ["m.*"]}, "state and kept are for a step of your own"),
        (
            lambda params, batch: None,
            {},
            r"the step takes \(params, batch\); expected \(params, state, batch, hyper\)",
        ),
        # Hyper-parameters.
        (
            LocalStep(proximal=True),
            {"hyper": {"rate": 0.1}},
            "hyper-parameter rate=0.1: the step has lr, mu, each a finite number",
        ),
        (
            LocalStep(),
            {"hyper": {"lr": None}},
            "hyper-parameter lr=None: the step has lr, each a finite number",
        ),
        (
            LocalStep(),
            {"hyper": {"lr": "fast"}},
            "hyper-parameter lr='fast': the step has lr, each a finite number",
        ),
        (
            sgd,
            {"hyper": {"lr": float("nan")}},
            "hyper-parameter lr=nan: a step of your own takes a finite number",
        ),
        (
            sgd,
            {"hyper": {"lr": 1e31}},
            r"hyper-parameter lr=1e\+31: a step of your own takes a finite number",
        ),
        (sgd, {"hyper": {"l r": 0.1}}, "hyper-parameter name 'l r'"),
        (sgd, {"hyper": {"lr": 0.1, "seed": 1}}, "no hyper-parameter is named seed"),
        (
            sgd,
            {},
            (
                r"on the example the step fails in PyTorch itself: KeyError: 'lr' at .* in "
                r"(<dictcomp>|sgd)"
            ),
        ),
        # State.
        (sgd, {**HYPER, "state": {"": torch.zeros(1)}}, "state name ''"),
        (sgd, {**HYPER, "state": {"s": ["a"]}}, "state s cannot become a tensor"),
        (
            sgd,
            {**HYPER, "state": {"s": torch.zeros(2, dtype=torch.int64)}},
            r"state s is torch.int64 of shape \(2,\)",
        ),
        (
            sgd,
            {**HYPER, "state": {"s": torch.zeros(0)}},
            r"state s is torch.float32 of shape \(0,\); expected float32",
        ),
        (sgd, {**HYPER, "state": {"s": torch.tensor(torch.inf)}}, "state s holds NaN or infinity"),
        (
            sgd,
            {**HYPER, "state": {"s": torch.zeros(1)}, "kept": ["v*"]},
            r"kept: 'v\*' is the name of no state of the step; there are s$",
        ),
        # Personal parameters.
        (
            LocalStep(),
            {"personal": ["tail"]},
            "personal: 'tail' is the name of no trained parameter or buffer that training changes; "
            "there are body.weight, .*norm.running_var",
        ),
        (
            LocalStep(),
            {"personal": "head"},
            "personal='head'; expected a list of names, or 'normalisation'",
        ),
        (
            LocalStep(),
            {"personal": ["norm.num_batches_tracked"]},
            "'norm.num_batches_tracked' is the name of no",
        ),
        (
            LocalStep(),
            {"personal": ["*"]},
            r"personal=\['\*'\] leaves no trained parameter that travels",
        ),
        (
            LocalStep(),
            {"personal": ["*.weight", "*.bias"]},
            "leaves no trained parameter that travels",
        ),
    ],
)
def test_bad_input_is_refused_by_name(step: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ExportError, match=text):
        made(step, **options)


def test_normalisation_alone_cannot_be_all_that_is_trained() -> None:
    model = Net()
    for layer in (model.body, model.head):
        layer.requires_grad_(False)
    with pytest.raises(
        ExportError, match="personal='normalisation' leaves no trained parameter that travels"
    ):
        made(model=model, personal="normalisation")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda p, s, m: None,
            "the step returned a NoneType; expected three dicts: params, state, metrics",
        ),
        (lambda p, s, m: (p, s), "the step returned a tuple; expected three dicts"),
        (lambda p, s, m: (p, s, m["loss"]), "the step returned a tuple; expected three dicts"),
        (
            lambda p, s, m: ({**p, "more": X}, s, m),
            r"the step returned next\.param\.more, which is not in the tables",
        ),
        (
            lambda p, s, m: (p, {"v": X}, m),
            r"the step returned next\.state\.v, which is not in the tables: .*`state`",
        ),
        (
            lambda p, s, m: (p, s, {**m, "norm": X}),
            r"the step returned metric\.norm, which is not in the tables",
        ),
        (
            lambda p, s, m: ({k: v for k, v in p.items() if k != "norm.running_var"}, s, m),
            r"the step did not return param\.norm\.running_var",
        ),
        (lambda p, s, m: (p, s, {"loss": m["loss"]}), r"the step did not return metric\.accuracy"),
        (lambda p, s, m: (p, s, {"accuracy": m["accuracy"]}), "the step did not return loss"),
        (
            lambda p, s, m: (p | {"head.bias": p["head.bias"].sum()}, s, m),
            (
                r"the step returned param\.head\.bias as torch.float32 \(\); expected a float32 "
                r"tensor of shape \(3,\)"
            ),
        ),
        (
            lambda p, s, m: (p, s, m | {"loss": 1.0}),
            "the step returned loss as a float; expected a float32 tensor of",
        ),
        (
            lambda p, s, m: (p, s, m | {"loss": m["loss"].double()}),
            (
                r"the step returned loss as torch.float64 \(\); expected a float32 tensor of shape "
                r"\(\)"
            ),
        ),
        (
            lambda p, s, m: (p, s, m | {"accuracy": X}),
            r"the step returned metric\.accuracy as torch.float32 \(4, 6\)",
        ),
    ],
)
def test_bad_results_are_refused_by_name(change: Any, text: str) -> None:
    with pytest.raises(ExportError, match=text):
        own(change)


def test_a_state_that_is_not_returned_as_it_was_is_refused() -> None:
    with pytest.raises(ExportError, match=r"the step did not return state\.v"):
        own(lambda p, s, m: (p, {}, m), state={"v": torch.zeros(2)})
    with pytest.raises(
        ExportError, match=r"the step returned state\.v as torch.float32 \(1,\); expected .* \(2,\)"
    ):
        own(lambda p, s, m: (p, {"v": s["v"][:1]}, m), state={"v": torch.zeros(2)})


def test_hyper_parameters_and_state_are_taken_over() -> None:
    step = made(LocalStep("adam", clip=True), hyper={"beta1": 0.5, "max_norm": 1})
    assert step.hyper == {
        "lr": None,
        "max_norm": 1.0,
        "beta1": 0.5,
        "beta2": 0.999,
        "epsilon": 1e-8,
    }
    step = own(
        hyper={"lr": None, "pull": 2}, state={"v.a": [1.0, 2.0], "t": torch.ones(())}, kept=["v"]
    )
    assert step.hyper == {"lr": None, "pull": 2.0}
    assert step.kept == {"v.a"}
    assert torch.equal(step.state["v.a"], torch.tensor([1.0, 2.0]))
    assert (step.rule, step.references) == (LocalStep("custom"), ())
    step = made(
        lambda p, s, b, h, *, correction, previous: (
            p,
            s,
            {"loss": b["x"].sum(), "accuracy": b["x"].sum()},
        )
    )
    assert step.rule == LocalStep("custom", correction=True)
    assert step.references == ("correction", "previous")


def test_names_by_pattern_and_by_module() -> None:
    names = ["head.weight", "head.bias", "headline.weight", "norm.weight"]
    assert names_matching(["head"], names, "personal", "parameter") == {"head.weight", "head.bias"}
    assert names_matching(["head*", "norm.weight"], names, "personal", "parameter") == set(names)
    assert names_matching([], names, "personal", "parameter") == set()


class Counting(nn.Module):
    """Buffers of five kinds: constant, changed in place, replaced, a counter on which nothing
    depends, and indices."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("shift", torch.ones(3))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("largest", torch.zeros(()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("order", torch.tensor([2, 0, 1]))

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.linear(x)[:, self.order] + self.shift
        self.mean.mul_(0.9).add_(0.1 * outputs.detach().mean(0))
        self.largest = torch.maximum(self.largest, outputs.detach().max())
        self.calls += 1
        return outputs


def test_buffers_that_training_changes() -> None:
    assert changed_buffers(source_of(Counting())) == {"mean", "largest"}
    assert changed_buffers(source_of()) == {"norm.running_mean", "norm.running_var"}
    twice = Net()
    twice.again = twice.norm
    assert changed_buffers(source_of(twice)) == {"norm.running_mean", "norm.running_var"}


class Remembering(nn.Linear):
    """Keeps its last outputs, as spiking layers do."""

    def __init__(self, persistent: bool) -> None:
        super().__init__(6, 3)
        self.register_buffer("last", torch.zeros(0), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        self.last = super().forward(x)
        return torch.tanh(self.last)


def test_what_a_layer_keeps_of_one_batch_does_not_travel() -> None:
    assert changed_buffers(source_of(Remembering(persistent=False))) == set()


class Averaging(Counting):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.calls


class Precise(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 3)
        self.register_buffer("sum", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        outputs = super().forward(x)
        self.sum += outputs.detach().sum()
        return outputs


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (
            nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3, momentum=None)),
            r"training depends on 1\.num_batches_tracked, a counter that does not travel "
            r"\(BatchNorm with momentum=None averages over all batches by it\): give BatchNorm a "
            r"momentum, or count in a float32 buffer",
        ),
        (Averaging(), "training depends on calls, a counter that does not travel"),
        (Precise(), "buffer sum changes in training and is torch.float64; expected float32"),
        (
            Remembering(persistent=True),
            r"buffer last of shape \(0,\) has shape \(\d+, 3\) after a training pass; .* "
            "register it with persistent=False",
        ),
    ],
    ids=["batch norm", "counter", "float64", "shape"],
)
def test_buffers_that_cannot_travel_are_refused(model: nn.Module, text: str) -> None:
    with pytest.raises(ExportError, match=text):
        made(model=model)


def by_autograd(p: Any, s: Any, b: Any, h: Any) -> Any:
    """The model called by the step itself, on what it is given."""
    leaves = {name: value.requires_grad_() for name, value in p.items()}
    loss = functional.cross_entropy(functional_call(PLAIN, leaves, (b["x"],)), b["y"])
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    moved = {
        name: p[name] - h["lr"] * gradient for name, gradient in zip(p, gradients, strict=True)
    }
    return moved, s, {"loss": loss, "accuracy": loss}


def by_func_grad(p: Any, s: Any, b: Any, h: Any) -> Any:
    def loss(q: Any) -> Tensor:
        return functional.cross_entropy(functional_call(PLAIN, q, (b["x"],)), b["y"])

    gradients, value = torch.func.grad_and_value(loss)(p)
    return (
        {n: p[n] - h["lr"] * g for n, g in gradients.items()},
        s,
        {"loss": value, "accuracy": value},
    )


def in_place(p: Any, s: Any, b: Any, h: Any, *, objective: Any) -> Any:
    found = objective(p, b)
    for name, gradient in found.gradients.items():
        p[name].sub_(h["lr"] * gradient)
    return p, s, {"loss": found.loss, **found.metrics}


def three_steps(p: Any, s: Any, b: Any, h: Any, *, objective: Any) -> Any:
    for _ in range(3):
        p, s, metrics = sgd(p, s, b, h, objective=objective)
    return p, s, metrics


def noisy(p: Any, s: Any, b: Any, h: Any, *, objective: Any) -> Any:
    p, s, metrics = sgd(p, s, b, h, objective=objective)
    return {name: value + 0.1 * torch.randn_like(value) for name, value in p.items()}, s, metrics


def with_the_number_of_rows(p: Any, s: Any, b: Any, h: Any, *, objective: Any) -> Any:
    moved, s, metrics = sgd(p, s, b, h, objective=objective)
    return (
        {name: p[name] + (value - p[name]) / b["x"].shape[0] for name, value in moved.items()},
        s,
        metrics,
    )


def each_example_clipped(p: Any, s: Any, b: Any, h: Any) -> Any:
    """The gradient of each example on its own (Abadi et al. 2016, arXiv 1607.00133, Algorithm 1),
    with their noise."""

    def loss(q: Any, x: Tensor, y: Tensor) -> Tensor:
        return -(
            torch.log_softmax(functional_call(PLAIN, q, (x[None],))[0], 0) * (torch.arange(3) == y)
        ).sum()

    gradients, losses = torch.func.vmap(torch.func.grad_and_value(loss), (None, 0, 0))(
        p, b["x"], b["y"]
    )
    norms = torch.sqrt(torch.stack([g.flatten(1).pow(2).sum(1) for g in gradients.values()]).sum(0))
    factors = torch.clamp(0.5 / norms, max=1.0)
    clipped = {
        n: (factors.reshape(-1, *[1] * (g.dim() - 1)) * g).mean(0) for n, g in gradients.items()
    }
    moved = {
        n: p[n] - h["lr"] * (g + 0.1 * torch.randn_like(g) / b["x"].shape[0])
        for n, g in clipped.items()
    }
    return moved, s, {"loss": losses.mean(), "accuracy": norms.mean()}


def twice_differentiated(p: Any, s: Any, b: Any, h: Any) -> Any:
    """A penalty on the gradient's length."""
    leaves = {name: value.requires_grad_() for name, value in p.items()}
    loss = functional.cross_entropy(functional_call(PLAIN, leaves, (b["x"],)), b["y"])
    length = torch.stack(
        [(g**2).sum() for g in torch.autograd.grad(loss, [*leaves.values()], create_graph=True)]
    ).sum()
    gradients = torch.autograd.grad(loss + length, list(leaves.values()))
    moved = {
        name: p[name] - h["lr"] * gradient for name, gradient in zip(p, gradients, strict=True)
    }
    return moved, s, {"loss": loss, "accuracy": length}


PLAIN = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))


@pytest.mark.parametrize(
    ("step", "model"),
    [
        (by_autograd, PLAIN),
        (by_func_grad, PLAIN),
        (in_place, Net()),
        (three_steps, Net()),
        (noisy, Net()),
        (each_example_clipped, PLAIN),
        (twice_differentiated, PLAIN),
        (with_the_number_of_rows, Net()),
    ],
    ids=lambda row: getattr(row, "__name__", ""),
)
def test_a_traced_step_does_what_the_step_does(step: Any, model: nn.Module) -> None:
    """On a batch of another size than it was traced with. What it is given stays as it was."""
    user = source_of(model)
    with training_mode(model):
        complete = make_train_step(user, step, hyper={"lr": 0.1})
        assert complete.random == (step in (noisy, each_example_clipped))
        arguments = complete.arguments()
        graph = trace(complete.run, arguments, {"batch.x": 0, "batch.y": 0}, {})
        given = arguments | {
            "batch.x": torch.randn(7, 6),
            "batch.y": torch.tensor([0, 1, 2, 0, 1, 2, 0]),
        }
        given |= {"seed": torch.tensor(5)} if complete.random else {}
        before = {name: value.clone() for name, value in given.items()}
        expected = complete.run(given)
        found = dict(zip(complete.outputs(), graph(*given.values()), strict=True))
    assert all(torch.equal(value, before[name]) for name, value in given.items())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert not any(value.requires_grad for value in expected.values())
    moved = max(
        float((expected[f"next.{name}"] - v).abs().max())
        for name, v in given.items()
        if name[0] == "p"
    )
    assert moved > 1e-3
    if step is by_func_grad:
        plain = make_train_step(user, sgd, hyper={"lr": 0.1}).run(given)
        torch.testing.assert_close(
            {**expected, "metric.accuracy": plain["metric.accuracy"]}, plain, rtol=0, atol=1e-6
        )


def test_a_random_step_repeats_itself_with_its_seed() -> None:
    step = made(noisy, hyper={"lr": 0.1})
    with training_mode(step.objective.model):
        first, second = (step.run(step.arguments() | {"seed": torch.tensor(3)}) for _ in range(2))
        other = step.run(step.arguments() | {"seed": torch.tensor(4)})
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    noise = first["next.param.body.weight"] - other["next.param.body.weight"]
    assert float(noise.std()) == pytest.approx(0.1 * 2**0.5, rel=0.5)


def test_a_built_in_step_is_random_if_the_model_the_loss_or_a_metric_draws() -> None:
    def with_noise(outputs: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, y) + torch.rand(())

    x, y = torch.randn(4, 5), torch.randint(3, (4,))
    for model, loss, metric, random in [
        (nn.Linear(5, 3), functional.cross_entropy, accuracy, False),
        (nn.Sequential(nn.Linear(5, 3), nn.Dropout(0.5)), functional.cross_entropy, accuracy, True),
        (nn.Linear(5, 3), with_noise, accuracy, True),
        (nn.Linear(5, 3), functional.cross_entropy, with_noise, True),
    ]:
        user = make_user_model(model, loss, (x, y), {"m": metric}, None, 1)
        with training_mode(model):
            assert make_train_step(user, LocalStep()).random == random


def branching(p: Any, s: Any, b: Any, h: Any, *, objective: Any) -> Any:
    found = objective(p, b)
    if found.loss > 1:  # branching
        return p, s, {"loss": found.loss, **found.metrics}
    return sgd(p, s, b, h, objective=objective)


def converting(p: Any, s: Any, b: Any, h: Any, *, objective: Any) -> Any:
    rate = float(h["lr"])  # converting
    return sgd(p, s, b, {"lr": rate}, objective=objective)


def counting(p: Any, s: Any, b: Any, h: Any, *, objective: Any) -> Any:
    rate = h["lr"] / int(b["x"].shape[0])  # counting
    return sgd(p, s, b, {"lr": rate}, objective=objective)


def transforming(p: Any, s: Any, b: Any, h: Any, *, objective: Any) -> Any:
    rate = torch.fft.fft(b["x"]).exp().abs().mean() * h["lr"]  # transforming
    return sgd(p, s, b, {"lr": rate}, objective=objective)


def sorting(p: Any, s: Any, b: Any, h: Any, *, objective: Any) -> Any:
    rate = b["x"].mode(0).values.sum() * h["lr"]  # sorting
    return sgd(p, s, b, {"lr": rate}, objective=objective)


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (
            branching,
            "the training step cannot be traced: control flow depends on the values .*torch.where",
        ),
        (
            converting,
            (
                r"the training step cannot be traced: control flow depends on the values .*not "
                r"with float\(...\)"
            ),
        ),
        (
            counting,
            r"the training step cannot be traced: the number of examples is fixed .*x\.shape\[0\]",
        ),
        (transforming, r"operator aten\.\S+ at .* gives complex numbers"),
        (sorting, r"operator aten\.mode at .* has no counterpart in ONNX"),
    ],
)
def test_what_cannot_be_a_graph_is_named_with_its_line(step: Any, text: str, tmp_path: Any) -> None:
    with pytest.raises(ExportError, match=text) as caught:
        export_bundle(
            PLAIN, functional.cross_entropy, (X, Y), tmp_path / "b", step=step, hyper={"lr": None}
        )
    line = next(
        n
        for n, row in enumerate(linecache.getlines(__file__), 1)
        if row.endswith(f"# {step.__name__}\n")
    )
    assert f"{__file__}:{line} in {step.__name__}" in str(caught.value)
