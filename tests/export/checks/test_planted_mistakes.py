"""Models and losses whose numbers a graph can easily get wrong: each is exported right, or refused
in words that help.

What is exported is trained in plain PyTorch too, the user's own module in place. Then the mistake
is planted: with an objective that sees the model's own tensors in the loss and in the backward
pass, as ours once did, the check must refuse each of them.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from by_hand import GraphTraining
from fleetlearn_export import Exported, ExportError, LocalStep, checked_graphs, export_bundle
from fleetlearn_export.model.steps import Objective
from mutants import blind_objective
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Loss = Callable[..., Tensor]


class Planted(NamedTuple):
    """A model with its loss, and batches of it."""

    model: nn.Module
    loss: Loss
    batches: list[tuple[Tensor, ...]]
    features: Callable[[Any], Tensor] | None = None


def rows(count: int = 5, size: int = 4) -> list[tuple[Tensor, ...]]:
    return [(torch.randn(size, 6), torch.randint(3, (size,))) for _ in range(count)]


def words(count: int = 5) -> list[tuple[Tensor, ...]]:
    return [(torch.randint(12, (4, 5)), torch.randint(3, (4,))) for _ in range(count)]


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


class Of(nn.Module):
    """A module of these parts, whose forward is a function."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *arrays: Tensor) -> Any:
        return self.function(self, *arrays)


def penalty() -> Planted:
    """An L2 penalty on the parameters."""
    model = network()
    return Planted(
        model,
        lambda outputs, y: (
            functional.cross_entropy(outputs, y)
            + 0.1 * sum(value.pow(2).sum() for value in model.parameters())
        ),
        rows(),
    )


def elastic_weights() -> Planted:
    """EWC: the parameters stay near those of an earlier task, which are copies and do not
    change."""
    model = network()
    earlier = {name: value.detach().clone() for name, value in model.named_parameters()}

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        far = torch.stack(
            [(value - earlier[name]).pow(2).sum() for name, value in model.named_parameters()]
        )
        return functional.cross_entropy(outputs, y) + 5 * far.sum()

    return Planted(model, loss, rows())


def checkpointed() -> Planted:
    """A block that the backward pass computes again."""
    block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    model = Of(
        lambda own, x: checkpoint(own.b, own.a(x), use_reentrant=False), a=nn.Linear(6, 8), b=block
    )
    return Planted(model, functional.cross_entropy, rows())


def masked_gradient() -> Planted:
    """A hook that freezes the first rows of an embedding."""
    model = Of(lambda own, x: own.o(own.e(x).mean(1)), e=nn.Embedding(12, 8), o=nn.Linear(8, 3))
    mask = (torch.arange(12) >= 6).float()[:, None]
    model.e.weight.register_hook(lambda gradient: gradient * mask)
    return Planted(model, functional.cross_entropy, words())


def prototypes() -> Planted:
    """A parameter that the loss alone reads."""
    model = Of(
        lambda own, x: own.body(x), body=network(), prototypes=nn.Parameter(torch.randn(3, 3))
    )
    return Planted(
        model,
        lambda z, y: functional.cross_entropy(-(torch.cdist(z, model.prototypes) ** 2), y),
        rows(),
    )


class _Multiply(torch.autograd.Function):
    """A product whose backward reads the weight from the module."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, module: nn.Module) -> Tensor:
        ctx.save_for_backward(x)
        ctx.module = module
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        return gradient @ ctx.module.weight, gradient.t() @ ctx.saved_tensors[0], None


def backward_reads_module() -> Planted:
    def forward(own: Any, x: Tensor) -> Any:
        return _Multiply.apply(own.a(x).tanh(), own.o.weight, own.o)

    model = Of(forward, a=nn.Linear(6, 8), o=nn.Linear(8, 3, bias=False))
    return Planted(model, functional.cross_entropy, rows())


def gradient_penalty() -> Planted:
    """WGAN-GP's critic, which the loss calls again."""
    critic = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    model = Of(lambda own, real, fake: (own.d(real)[:, 0], own.d(fake)[:, 0], real, fake), d=critic)

    def loss(outputs: Any, _: Tensor) -> Tensor:
        real_score, fake_score, real, fake = outputs
        with torch.enable_grad():
            x = (0.5 * real + 0.5 * fake).detach().requires_grad_()
            (gradient,) = torch.autograd.grad(model.d(x).sum(), x, create_graph=True)
        return fake_score.mean() - real_score.mean() + 10 * ((gradient.norm(dim=1) - 1) ** 2).mean()

    return Planted(
        model, loss, [(torch.randn(4, 6), torch.randn(4, 6) + 1, torch.zeros(4)) for _ in range(5)]
    )


class _WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.scale = network(), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.body(x)
        return found

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(outputs * self.scale, y)


def loss_of_the_model() -> Planted:
    """A loss that is a method of the model, and reads a parameter."""
    model = _WithLoss()
    return Planted(model, model.loss, rows())


class _Criterion(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, outputs: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, y) + 0.1 * self.model[0].weight.abs().sum()


def criterion_with_the_model() -> Planted:
    """A loss that is a module around the model: L1 on one layer."""
    model = network()
    return Planted(model, _Criterion(model), rows())


def contrast_by_a_projection() -> Planted:
    """MOON's features go through a layer of the model, which forward does not call."""
    model = Of(lambda own, x: own.body(x), body=network(), head=nn.Linear(3, 4))
    return Planted(model, functional.cross_entropy, rows(), lambda outputs: model.head(outputs))


AGREEING = [
    penalty,
    elastic_weights,
    checkpointed,
    masked_gradient,
    prototypes,
    backward_reads_module,
    gradient_penalty,
    loss_of_the_model,
    criterion_with_the_model,
]


def exported_to(path: Path, planted: Planted, **options: Any) -> Exported:
    return export_bundle(planted.model, planted.loss, planted.batches[0], path / "b", **options)


def in_place(planted: Planted, optimizer: torch.optim.Optimizer) -> list[float]:
    """Train the module as a person would. Returns the losses."""
    losses = []
    planted.model.train()
    for *inputs, target in planted.batches:
        optimizer.zero_grad()
        loss = planted.loss(planted.model(*inputs), target)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


def agrees(
    exported: Exported, planted: Planted, optimizer: torch.optim.Optimizer, **hyper: float
) -> None:
    """Hold the bundle's steps against the module's own, which begin at the same parameters."""
    training = GraphTraining(exported.bundle, hyper)
    losses = [training.step(batch)["loss"] for batch in planted.batches]
    assert losses == pytest.approx(in_place(planted, optimizer), abs=1e-5)
    own = {name: value.detach().numpy() for name, value in planted.model.named_parameters()}
    assert training.parameters.keys() == own.keys()
    assert (
        max(float(np.abs(own[name] - value).max()) for name, value in training.parameters.items())
        < 1e-5
    )


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("make", AGREEING)
def test_agrees_with_the_module_trained_in_place(
    make: Callable[[], Planted], tmp_path: Path
) -> None:
    planted = make()
    exported = exported_to(tmp_path, planted)
    assert exported.without_gradient == ()
    agrees(exported, planted, torch.optim.SGD(planted.model.parameters(), lr=0.1), lr=0.1)


@pytest.mark.parametrize("make", AGREEING)
def test_a_blind_objective_is_caught(
    make: Callable[[], Planted], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mistake is planted: loss, backward pass and hooks see the model's own tensors while the
    step is traced."""
    planted = make()
    monkeypatch.setattr(Objective, "__call__", blind_objective)
    monkeypatch.setattr(checked_graphs, "refuse_own_values", lambda *_: None)
    with pytest.raises(ExportError) as caught:
        exported_to(tmp_path, planted)
    # An error of PyTorch's own export, which is tried afterwards for a better text, may have
    # replaced the check's.
    texts = "".join(traceback.format_exception(caught.value))
    assert "step has another gradient than PyTorch for parameter" in texts


def test_without_the_search_for_constants_the_numbers_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checked_graphs, "refuse_own_values", lambda *_: None)
    with pytest.raises(
        ExportError, match=r"step has another gradient than PyTorch for parameter e\.weight"
    ):
        exported_to(tmp_path, tied_through_a_list())


def test_training_in_place_tells_what_is_right_at_the_first_values_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss takes the numbers out of a weight that it keeps: a copy, in whose memory nobody can
    see the weight."""
    model = network()
    kept = model[2].weight

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        return (
            functional.cross_entropy(outputs, y)
            + (outputs.mean(0) * torch.tensor(kept.tolist()).sum(1)).sum()
        )

    planted = Planted(model, loss, rows())
    with pytest.raises(
        ExportError, match="the traced step has another gradient than PyTorch for parameter"
    ):
        exported_to(tmp_path, planted)
    monkeypatch.setattr(
        checked_graphs, "trained_in_place", lambda user, step, features: nullcontext(step)
    )
    assert exported_to(tmp_path, planted).difference < 1e-5, (
        "the check at the first values alone lets it pass"
    )


def tied_through_a_list() -> Planted:
    def forward(own: Any, x: Tensor) -> Tensor:
        return functional.linear(own.l(own.e(x)).mean(1).tanh(), own.tied[0])

    embedding = nn.Embedding(12, 8)
    model = Of(forward, e=embedding, l=nn.Linear(8, 8), tied=[embedding.weight])
    return Planted(model, functional.cross_entropy, words())


def tied_by_data() -> Planted:
    """Two parameters in the same memory."""
    model = Of(lambda own, x: own.o(own.e(x).mean(1)), e=nn.Embedding(12, 8), o=nn.Linear(8, 12))
    model.o.weight.data = model.e.weight.data
    return Planted(model, functional.cross_entropy, words())


def only_through_a_list() -> Planted:
    model = Of(lambda own, x: x @ own.all[0], w=nn.Parameter(torch.randn(6, 3)))
    model.all = [model.w]  # type: ignore[assignment]
    return Planted(model, functional.cross_entropy, rows())


def penalty_on_a_list() -> Planted:
    model = network()
    kept = list(model.parameters())
    return Planted(
        model,
        lambda outputs, y: (
            functional.cross_entropy(outputs, y) + 0.1 * sum(value.pow(2).sum() for value in kept)
        ),
        rows(),
    )


def weights_as_an_array() -> Planted:
    """NumPy's view of a weight."""
    model = network()
    array = model[2].weight.detach().numpy()
    return Planted(
        model,
        lambda outputs, y: (
            functional.cross_entropy(outputs, y)
            + torch.from_numpy(array).abs().sum() * outputs.mean()
        ),
        rows(),
    )


def parameter_outside_the_model() -> Planted:
    """Weights of two losses that are learnt, beside the model."""
    weight = nn.Parameter(torch.zeros(()))
    return Planted(
        network(),
        lambda outputs, y: functional.cross_entropy(outputs, y) * torch.exp(-weight) + weight,
        rows(),
    )


def accumulation_hook() -> Planted:
    model = network()
    model[0].weight.register_post_accumulate_grad_hook(lambda value: value.grad.mul_(0.5))  # type: ignore[union-attr]
    return Planted(model, functional.cross_entropy, rows())


def first_batch_initialises() -> Planted:
    """ActNorm."""

    def forward(own: Any, x: Tensor) -> Any:
        x = own.a(x)
        if own.training and not own.initialised:
            with torch.no_grad():
                own.shift.copy_(-x.mean(0))
            own.initialised = True
        return own.b((x + own.shift).tanh())

    model = Of(
        forward,
        a=nn.Linear(6, 8),
        shift=nn.Parameter(torch.zeros(8)),
        b=nn.Linear(8, 3),
        initialised=False,
    )
    return Planted(model, functional.cross_entropy, rows())


def first_batch_sets_a_buffer() -> Planted:
    """The same, with a flag that is a buffer."""

    def forward(own: Any, x: Tensor) -> Any:
        x = own.a(x)
        if own.training and not own.flag.item():
            with torch.no_grad():
                own.shift.copy_(-x.mean(0))
                own.flag.fill_(1)
        return own.b((x + own.shift).tanh())

    model = Of(forward, a=nn.Linear(6, 8), shift=nn.Parameter(torch.zeros(8)), b=nn.Linear(8, 3))
    model.register_buffer("flag", torch.tensor(0))
    return Planted(model, functional.cross_entropy, rows())


def counts_its_calls() -> Planted:
    """A penalty that grows from step to step, by an attribute."""

    def forward(own: Any, x: Tensor) -> Any:
        own.calls += 1
        return own.a(x) * (1 + 0.1 * own.calls)

    return Planted(Of(forward, a=network(), calls=0), functional.cross_entropy, rows())


def flipped(draw: Callable[[], float]) -> Planted:
    def forward(own: Any, x: Tensor) -> Any:
        if own.training and draw() < 0.1:
            x = x.flip(1)
        return own.a(x)

    return Planted(Of(forward, a=network()), functional.cross_entropy, rows())


def teacher_forcing() -> Planted:
    def forward(own: Any, source: Tensor, target: Tensor) -> Tensor:
        hidden = own.e(source).mean(1)
        word, outputs = target[:, 0], []
        teacher = True if random.random() < 0.5 else False  # noqa: SIM210  # as the tutorial has it
        for i in range(1, target.shape[1]):
            hidden = own.c(own.e(word), hidden)
            outputs.append(own.o(hidden))
            word = target[:, i] if teacher else outputs[-1].argmax(1).detach()
        return torch.stack(outputs, 1)

    model = Of(forward, e=nn.Embedding(12, 8), c=nn.GRUCell(8, 8), o=nn.Linear(8, 12))
    target = torch.randint(12, (4, 4))

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(outputs.flatten(0, 1), y.flatten())

    return Planted(model, loss, [(torch.randint(12, (4, 5)), target, target[:, 1:])])


def random_in_evaluation() -> Planted:
    def forward(own: Any, x: Tensor) -> Any:
        return own.a(x if own.training else x * random.choice([0.8, 1.2]))

    return Planted(Of(forward, a=network()), functional.cross_entropy, rows())


FROM_ELSEWHERE = (
    r"from a list, another object or a variable .* self\.{0} in forward, model\.{0} or model\.param"
)
HERE = rf" at {__file__}:\d+ in forward"
REFUSED = {
    tied_through_a_list: rf"parameter e\.weight is read{HERE} {FROM_ELSEWHERE.format('e.weight')}",
    tied_by_data: (
        r"share memory, as after o\.weight\.data = e\.weight\.data, .* Tie them as one parameter"
    ),
    only_through_a_list: rf"parameter w is read {FROM_ELSEWHERE.format('w')}",
    penalty_on_a_list: rf"parameter 0\.weight is read at {__file__}:\d+ in <\w+> from a list",
    weights_as_an_array: r"parameter 2\.weight is read .*from a list, another object",
    parameter_outside_the_model: (
        r"a parameter of shape \(\) .* not one of the model's.* make it a part of the model"
    ),
    accumulation_hook: (
        r"parameter 0\.weight has a hook of register_post_accumulate_grad_hook.* as register_hook"
    ),
    first_batch_initialises: (
        r"another result when it runs again.* initialised changed .* run the model on a batch"
    ),
    first_batch_sets_a_buffer: r"depends on flag",
    counts_its_calls: r"another result when it runs again.* calls changed .* float32 buffer",
    partial(
        flipped, random.random
    ): rf"draws a random number from Python's random{HERE}.*torch\.where",
    partial(
        flipped, np.random.rand
    ): rf"draws a random number from numpy\.random{HERE}.*torch\.where",
    partial(
        flipped, lambda: random.uniform(0, 1)
    ): rf"Python's random at {__file__}:\d+ in <lambda>",
    teacher_forcing: (
        rf"the model, its loss or a metric draws a random number from Python's random{HERE}"
    ),
    random_in_evaluation: rf"in evaluation mode the model, .* from Python's random{HERE}",
}


@pytest.mark.parametrize("make", REFUSED, ids=lambda make: getattr(make, "__name__", "flipped"))
def test_refused_in_words_that_help(make: Callable[[], Planted], tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=f"(?s){REFUSED[make]}"):
        exported_to(tmp_path, make())
    assert not (tmp_path / "b").exists()


def test_random_numbers_of_a_generator_of_the_users_own(tmp_path: Path) -> None:
    """Its state is nowhere to be seen: two runs that differ tell."""
    own = np.random.default_rng(0)
    planted = Planted(
        Of(lambda self, x: self.a(x) * own.choice([0.8, 1.2]) * own.uniform(0.9, 1.1), a=network()),
        functional.cross_entropy,
        rows(),
    )
    with pytest.raises(
        ExportError, match=r"another result when it runs again.* not from a generator of your own"
    ):
        exported_to(tmp_path, planted)


def test_random_numbers_in_a_step_of_the_users_own(tmp_path: Path) -> None:
    def step(params: Any, state: Any, batch: Any, hyper: Any, *, objective: Any) -> Any:
        found = objective(params, batch)
        rate = random.choice([0.1, 0.2])
        moved = {name: params[name] - rate * gradient for name, gradient in found.gradients.items()}
        return {**params, **moved}, state, {"loss": found.loss}

    planted = Planted(network(), functional.cross_entropy, rows())
    with pytest.raises(
        ExportError, match=rf"the step draws a random number from Python's random at {__file__}"
    ):
        exported_to(tmp_path, planted, step=step)


@pytest.mark.parametrize(
    ("step", "optimizer", "hyper"),
    [
        (
            LocalStep("momentum", weight_decay=True),
            partial(torch.optim.SGD, momentum=0.9, weight_decay=0.1),
            0.1,
        ),
        (LocalStep("adamw"), torch.optim.AdamW, None),
    ],
)
def test_hooks_under_other_optimizers(
    step: LocalStep, optimizer: Any, hyper: float | None, tmp_path: Path
) -> None:
    """The optimizer sees what a hook returns; decay is added afterwards, as torch.optim adds it."""
    planted = masked_gradient()
    exported = exported_to(tmp_path, planted, step=step)
    made = optimizer(planted.model.parameters(), lr=0.05)
    agrees(exported, planted, made, lr=0.05, **({} if hyper is None else {"weight_decay": hyper}))


def test_a_hook_gets_the_gradient_of_the_loss_alone(tmp_path: Path) -> None:
    """The proximal term is the algorithm's: it is added to what the hook returns. Worked by hand
    for one weight."""
    model = nn.Linear(1, 1, bias=False)
    model.weight.register_hook(lambda gradient: 0.5 * gradient)
    batch = (torch.tensor([[2.0], [4.0]]), torch.ones(2, 1))
    planted = Planted(model, lambda outputs, y: (outputs * y).mean(), [batch])
    exported = exported_to(tmp_path, planted, step=LocalStep(proximal=True))
    start = model.weight.item()
    training = GraphTraining(
        exported.bundle, {"lr": 0.1, "mu": 2.0}, {"anchor": {"weight": np.array([[start + 1]])}}
    )
    training.references["anchor"]["weight"] = training.references["anchor"]["weight"].astype(
        np.float32
    )
    training.step(planted.batches[0])
    # The loss's gradient is the mean of x, 3.
    assert training.parameters["weight"].item() == pytest.approx(
        start - 0.1 * (0.5 * 3 + 2 * -1), abs=1e-6
    )


def test_a_step_of_the_users_own_calls_hooks_through_the_objective(tmp_path: Path) -> None:
    def step(params: Any, state: Any, batch: Any, hyper: Any, *, objective: Any) -> Any:
        found = objective(params, batch)
        moved = {
            name: params[name] - hyper["lr"] * gradient
            for name, gradient in found.gradients.items()
        }
        return {**params, **moved}, state, {"loss": found.loss}

    planted = masked_gradient()
    exported = exported_to(tmp_path, planted, step=step, hyper={"lr": None})
    agrees(exported, planted, torch.optim.SGD(planted.model.parameters(), lr=0.1), lr=0.1)

    def without(params: Any, state: Any, batch: Any, hyper: Any) -> Any:
        return params, state, {"loss": params["o.bias"].sum()}

    with pytest.raises(
        ExportError, match=r"parameter e\.weight has a gradient hook .* only through `objective`"
    ):
        exported_to(tmp_path, masked_gradient(), step=without)


def test_features_read_the_model_that_they_are_of(tmp_path: Path) -> None:
    """MOON's three models each have a projection of their own."""
    planted = contrast_by_a_projection()
    exported = exported_to(
        tmp_path, planted, step=LocalStep(contrastive=True), features=planted.features
    )
    values = {name: value.detach().clone() for name, value in planted.model.named_parameters()}
    models = {
        name: {key: value + 0.3 * torch.randn_like(value) for key, value in values.items()}
        for name in ("anchor", "previous")
    }
    references = {
        name: {key: value.numpy() for key, value in rows.items()} for name, rows in models.items()
    }
    training = GraphTraining(
        exported.bundle, {"lr": 0.1, "mu": 2.0, "temperature": 0.5}, references
    )
    x, y = planted.batches[0]
    training.step((x, y))

    def features(tensors: dict[str, Tensor]) -> Tensor:
        body = torch.func.functional_call(planted.model, tensors, (x,))
        return functional.linear(body, tensors["head.weight"], tensors["head.bias"])

    leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
    near, far = (
        torch.exp(functional.cosine_similarity(features(leaves), features(models[name])) / 0.5)
        for name in ("anchor", "previous")
    )
    loss = functional.cross_entropy(torch.func.functional_call(planted.model, leaves, (x,)), y)
    (loss - 2.0 * torch.log(near / (near + far)).mean()).backward()  # type: ignore[no-untyped-call]
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        expected = (leaf - 0.1 * leaf.grad).detach().numpy()
        assert float(np.abs(training.parameters[name] - expected).max()) < 1e-5


def test_adamw_decays_as_torch_does(tmp_path: Path) -> None:
    """Without a word about decay; and not with weight_decay 0."""
    planted = Planted(network(), functional.cross_entropy, rows(10))
    exported = exported_to(tmp_path, planted, step=LocalStep("adamw"))
    start = {name: value.clone() for name, value in planted.model.state_dict().items()}
    agrees(exported, planted, torch.optim.AdamW(planted.model.parameters(), lr=0.05), lr=0.05)
    planted.model.load_state_dict(start)
    agrees(
        exported,
        planted,
        torch.optim.Adam(planted.model.parameters(), lr=0.05),
        lr=0.05,
        weight_decay=0.0,
    )
