"""Small models of many kinds, each with a loss, metrics and random batches of the right shapes.

``make("gru")`` gives the same weights each time; ``NAMES`` lists them all. Of every kind one: what
a layer needs from the exporter does not depend on its size. Those that the benchmarks measure have
the sizes that people use.
"""

# A call of a module has no type.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

Arrays = tuple[Tensor, ...]


class Case(NamedTuple):
    """A model, and all that training it needs."""

    module: nn.Module
    loss: Callable[..., Tensor]
    """(outputs, *targets) -> the batch's mean."""
    metrics: dict[str, Callable[..., Tensor]]
    targets: int
    """How many of a batch's last arrays go to the loss."""
    draw: Callable[[int, torch.Generator], Arrays]

    def batch(self, n: int, seed: int = 0) -> Arrays:
        """``n`` random examples: the model's inputs, then the targets."""
        return self.draw(n, torch.Generator().manual_seed(seed))


def accuracy(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs.argmax(1) == y).float()


def mean_error(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs - y).abs().flatten(1).mean(1)


def classes(count: int, *shape: int) -> Callable[[int, torch.Generator], Tensor]:
    """Draws labels, int64 (n, *shape)."""
    return lambda n, random: torch.randint(count, (n, *shape), generator=random)


def numbers(*shape: int) -> Callable[[int, torch.Generator], Tensor]:
    """Draws float32 (n, *shape), normally distributed."""
    return lambda n, random: torch.randn(n, *shape, generator=random)


def case(
    module: nn.Module,
    loss: Callable[..., Tensor],
    *draws: Callable[[int, torch.Generator], Tensor],
    metrics: dict[str, Callable[..., Tensor]] | None = None,
    targets: int = 1,
) -> Case:
    return Case(
        module,
        loss,
        metrics or {},
        targets,
        lambda n, random: tuple(draw(n, random) for draw in draws),
    )


def classifier(
    module: nn.Module, x: Callable[[int, torch.Generator], Tensor], count: int = 10, **options: Any
) -> Case:
    """Return a case with cross-entropy as its loss; ``options`` are cross-entropy's."""
    loss = nn.CrossEntropyLoss(**options) if options else functional.cross_entropy
    return case(module, loss, x, classes(count), metrics={"accuracy": accuracy})


def softmax() -> Case:
    return classifier(nn.Linear(784, 10), numbers(784))


def mlp() -> Case:
    """The 2NN of McMahan et al. 2017 (arXiv 1602.05629): 199,210 parameters."""
    layers = nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10)
    return classifier(nn.Sequential(*layers), numbers(784))


def mcmahan_cnn() -> nn.Module:
    """The CNN of McMahan et al. 2017 (arXiv 1602.05629), 1,663,370 parameters; float32 (n, 1,
    28, 28) -> (n, 10)."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(3136, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


def mcmahan() -> Case:
    return classifier(mcmahan_cnn(), numbers(1, 28, 28))


def lenet() -> Case:
    """LeNet-5 (LeCun et al. 1998) with average pooling; smoothed labels."""
    layers = [
        nn.Conv2d(1, 6, 5, padding=2),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.Tanh(),
        nn.Linear(120, 84),
        nn.Tanh(),
        nn.Linear(84, 10),
    ]
    return classifier(nn.Sequential(*layers), numbers(1, 28, 28), label_smoothing=0.1)


class Residual(nn.Module):
    """He et al. 2015 (arXiv 1512.03385), figure 2: two convolutions beside a shortcut."""

    def __init__(
        self, inputs: int, outputs: int, stride: int, norm: Callable[[int], nn.Module]
    ) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            norm(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            norm(outputs),
        )
        self.shortcut = nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs)
        )
        if inputs == outputs:
            self.shortcut = nn.Sequential()

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


def resnet8(norm: Callable[[int], nn.Module]) -> Case:
    """Three residual blocks, with an adaptive pool before the last layer."""
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        norm(8),
        nn.ReLU(inplace=True),
        Residual(8, 8, 1, norm),
        Residual(8, 16, 2, norm),
        Residual(16, 32, 2, norm),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )
    return classifier(module, numbers(3, 16, 16))


class InvertedResidual(nn.Module):
    """MobileNetV3's block with squeeze-and-excite (Howard et al. 2019, arXiv 1905.02244, figure
    4)."""

    def __init__(self, channels: int, wide: int, kernel: int) -> None:
        super().__init__()
        self.expand = nn.Sequential(
            nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.Hardswish()
        )
        self.depthwise = nn.Sequential(
            nn.Conv2d(wide, wide, kernel, padding=kernel // 2, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            nn.Hardswish(inplace=True),
        )
        self.excite = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(wide, wide // 4, 1),
            nn.ReLU(),
            nn.Conv2d(wide // 4, wide, 1),
            nn.Hardsigmoid(),
        )
        self.project = nn.Sequential(
            nn.Conv2d(wide, channels, 1, bias=False), nn.BatchNorm2d(channels)
        )

    def forward(self, x: Tensor) -> Tensor:
        z = self.depthwise(self.expand(x))
        return x + self.project(z * self.excite(z))


def inverted_residual() -> Case:
    module = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.Hardswish(),
        InvertedResidual(16, 64, 5),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )
    return classifier(module, numbers(3, 32, 32))


def dilated() -> Case:
    """Windows of six sensors; the classes are of unequal weight."""
    module = nn.Sequential(
        nn.Conv1d(6, 8, 3, padding="same"),
        nn.ReLU(),
        nn.Conv1d(8, 8, 3, padding=2, dilation=2),
        nn.LeakyReLU(),
        nn.MaxPool1d(3, 2, 1),
        nn.Conv1d(8, 8, 3, stride=2, dilation=4),
        nn.ELU(),
        nn.AvgPool1d(2),
        nn.Flatten(),
        nn.LazyLinear(5),
    )
    module(torch.zeros(1, 6, 50))
    return classifier(module, numbers(6, 50), 5, weight=torch.tensor([1.0, 0.5, 2.0, 1.0, 3.0]))


def convolutions() -> Case:
    """Strides that leave rows over, padding that differs at the two ends, groups."""
    module = nn.Sequential(
        nn.ZeroPad2d((0, 1, 2, 0)),
        nn.Conv2d(3, 8, 3, stride=2),
        nn.SiLU(),
        nn.ReflectionPad2d((1, 0, 0, 1)),
        nn.Conv2d(8, 8, (3, 2), stride=(2, 1), groups=4),
        nn.GELU(),
        nn.Conv2d(8, 12, 3, padding="same", groups=2),
        nn.Softplus(),
        nn.Flatten(),
        nn.LazyLinear(4),
    )
    module(torch.zeros(1, 3, 12, 13))
    return case(
        module,
        nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 1.0, 0.5])),
        numbers(3, 12, 13),
        multi,
    )


def multi(n: int, random: torch.Generator) -> Tensor:
    """Several labels at once, float32 (n, 4) of 0 and 1."""
    return torch.randint(2, (n, 4), generator=random).float()


def transposed() -> Case:
    """A decoder: from a code to an image."""
    module = nn.Sequential(
        nn.Linear(6, 32),
        nn.PReLU(),
        nn.Unflatten(1, (8, 2, 2)),
        nn.ConvTranspose2d(8, 4, 3, stride=2, padding=1, output_padding=1),
        nn.ReLU6(),
        nn.ConvTranspose2d(4, 4, 4, stride=2, padding=1, groups=2),
        nn.Tanh(),
        nn.ConvTranspose2d(4, 1, 3, dilation=2, bias=False),
    )
    return case(module, nn.L1Loss(), numbers(6), numbers(1, 12, 12), metrics={"error": mean_error})


class Pools(nn.Module):
    """All kinds of pooling beside each other, on sizes that do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3)
        self.pools = nn.ModuleList(
            [
                nn.MaxPool2d(2),
                nn.MaxPool2d(3, 2, padding=1),
                nn.MaxPool2d(3, 2, ceil_mode=True),
                nn.AvgPool2d(2),
                nn.AvgPool2d(3, 2, padding=1),
                nn.AvgPool2d(3, 2, padding=1, count_include_pad=False, ceil_mode=True),
                nn.AdaptiveAvgPool2d((3, 2)),
                nn.AdaptiveAvgPool2d((4, 5)),
                nn.AdaptiveMaxPool2d(1),
                nn.AdaptiveMaxPool2d((5, 4)),
                nn.LPPool2d(2, 3),
            ]
        )
        self.last = nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x)
        lines = z.flatten(2)
        more = [
            functional.adaptive_avg_pool1d(lines, 7),
            functional.adaptive_max_pool1d(lines, 11),
            z.amax((2, 3)),
        ]
        rows = [*(pool(z) for pool in self.pools), *more]
        return self.last(torch.cat([row.flatten(1) for row in rows], 1) / 10)


def pools() -> Case:
    module = Pools()
    module(torch.zeros(1, 2, 12, 11))
    return case(module, nn.MSELoss(), numbers(2, 12, 11), numbers(3))


class Recurrent(nn.Module):
    """A recurrent layer, the last layer on its last step."""

    def __init__(self, layer: nn.GRU | nn.LSTM | nn.RNN, outputs: int) -> None:
        super().__init__()
        self.layer = layer
        self.last = nn.Linear(layer.hidden_size * (1 + layer.bidirectional), outputs)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.layer(x)
        return self.last(states[:, -1])


def gru() -> Case:
    """A quarter of a second of nine sensors, as in human activity recognition."""
    return classifier(Recurrent(nn.GRU(9, 64, batch_first=True), 6), numbers(32, 9), 6)


def lstm() -> Case:
    """Two layers, in both directions."""
    layer = nn.LSTM(4, 5, num_layers=2, bidirectional=True, batch_first=True)
    return case(
        Recurrent(layer, 2),
        nn.HuberLoss(delta=0.5),
        numbers(7, 4),
        numbers(2),
        metrics={"error": mean_error},
    )


class Encoder(nn.Module):
    """Words to classes: embeddings of words and positions, a Transformer encoder that leaves
    padding (word 0) out."""

    def __init__(
        self, words: int, length: int, width: int, heads: int, layers: int, outputs: int
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width, padding_idx=0)
        self.positions = nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.0, batch_first=True)
        # Its other way through padding, in evaluation mode, warns that it is a prototype.
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.last = nn.Linear(width, outputs)

    def forward(self, words: Tensor) -> Tensor:
        z = self.words(words) + self.positions(torch.arange(words.shape[1], device=words.device))
        absent = words == 0
        z = self.layers(z, src_key_padding_mask=absent)
        return self.last(
            z.masked_fill(absent[..., None], 0).sum(1) / (~absent).sum(1, keepdim=True)
        )


def sentences(words: int, length: int) -> Callable[[int, torch.Generator], Tensor]:
    """Draws int64 (n, length): words from 1, then padding of 0."""

    def draw(n: int, random: torch.Generator) -> Tensor:
        lengths = torch.randint(length // 2, length + 1, (n, 1), generator=random)
        return torch.randint(1, words, (n, length), generator=random) * (
            torch.arange(length) < lengths
        )

    return draw


def transformer() -> Case:
    return classifier(Encoder(1000, 32, 64, 4, 1, 4), sentences(1000, 32), 4)


class VisionTransformer(nn.Module):
    """Patches, a class token, one layer written out with PyTorch's attention (Dosovitskiy et al.,
    arXiv 2010.11929)."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 10, width))
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.body = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.last = nn.Linear(width, 10)

    def attention(self, z: Tensor) -> Tensor:
        q, k, v = self.qkv(z).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        z = self.patches(x).flatten(2).transpose(1, 2)
        z = torch.cat([self.token.expand(z.shape[0], -1, -1), z], 1) + self.positions
        z = z + self.attention(self.norms[0](z))
        z = z + self.body(self.norms[1](z))
        return self.last(self.norms[2](z)[:, 0])


def vit() -> Case:
    return classifier(VisionTransformer(), numbers(3, 12, 12))


class UNet(nn.Module):
    """Down twice, up twice, joined at each level (Ronneberger et al. 2015, arXiv 1505.04597)."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(self.block(*sizes) for sizes in ((1, 4), (4, 8)))
        self.middle = self.block(8, 16)
        self.up = nn.ModuleList(
            [nn.ConvTranspose2d(16, 8, 2, stride=2), nn.Upsample(scale_factor=2, mode="bilinear")]
        )
        self.joined = nn.ModuleList([self.block(16, 8), self.block(12, 4)])
        self.last = nn.Conv2d(4, 3, 1)

    @staticmethod
    def block(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.InstanceNorm2d(outputs, affine=True),
            nn.ReLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        levels = []
        for block in self.down:
            x = block(x)
            levels.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.middle(x)
        for up, block in zip(self.up, self.joined, strict=True):
            x = block(torch.cat([up(x), levels.pop()], 1))
        return self.last(x)


def unet() -> Case:
    """A class for each pixel; some have no label (-100)."""

    def labels(n: int, random: torch.Generator) -> Tensor:
        return torch.randint(3, (n, 12, 12), generator=random).masked_fill(
            torch.rand(n, 12, 12, generator=random) < 0.2, -100
        )

    return case(UNet(), nn.CrossEntropyLoss(ignore_index=-100), numbers(1, 12, 12), labels)


def autoencoder() -> Case:
    """Return a case whose target is its input."""
    module = nn.Sequential(nn.Linear(20, 8), nn.Sigmoid(), nn.Linear(8, 20))

    def pair(n: int, random: torch.Generator) -> Arrays:
        x = torch.rand(n, 20, generator=random)
        return x, x.clone()

    return Case(module, functional.mse_loss, {}, 1, pair)


class Bag(nn.Module):
    """The mean of a text's word vectors, beside their largest and their sum over pairs of words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(50, 8, mode="mean")
        self.pairs = nn.EmbeddingBag(2500, 4, mode="sum")
        self.last = nn.Linear(12, 3)

    def forward(self, words: Tensor) -> Tensor:
        pairs = words[:, 1:] * 50 + words[:, :-1]
        return self.last(torch.cat([self.words(words), self.pairs(pairs)], 1))


def embedding_bag() -> Case:
    return classifier(Bag(), classes(50, 9), 3)


class TwoHeads(nn.Module):
    """An image and some measurements in; a class and a number out."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.Flatten())
        self.table = nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 8), nn.ReLU())
        self.kind, self.size = nn.Linear(36 + 8, 3), nn.Bilinear(36, 8, 1)

    def forward(self, image: Tensor, table: Tensor) -> dict[str, Tensor]:
        a, b = self.image(image), self.table(table)
        return {"kind": self.kind(torch.cat([a, b], 1)), "size": self.size(a, b)[:, 0]}


def two_heads() -> Case:
    def both(outputs: dict[str, Tensor], kind: Tensor, size: Tensor) -> Tensor:
        return functional.cross_entropy(outputs["kind"], kind) + 0.5 * functional.smooth_l1_loss(
            outputs["size"], size
        )

    return case(
        TwoHeads(),
        both,
        numbers(1, 8, 8),
        numbers(5),
        classes(3),
        numbers(),
        metrics={"accuracy": lambda outputs, kind, size: accuracy(outputs["kind"], kind)},
        targets=2,
    )


class Tied(nn.Module):
    """A language model whose output layer is its embedding; a causal mask."""

    def __init__(self, words: int = 20, width: int = 8, length: int = 6) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.last = nn.Linear(width, words, bias=False)
        self.last.weight = self.words.weight
        self.register_buffer("mask", torch.triu(torch.full((length, length), -math.inf), 1))

    def forward(self, words: Tensor) -> Tensor:
        z = self.words(words)
        z = self.norm(z + self.attention(z, z, z, attn_mask=self.mask, need_weights=False)[0])
        return self.last(z).transpose(1, 2)


def tied() -> Case:
    """The target is the next word; 0 is padding, which the loss leaves out."""
    return case(Tied(), nn.CrossEntropyLoss(ignore_index=0), classes(20, 6), classes(20, 6))


def focal(outputs: Tensor, y: Tensor) -> Tensor:
    """A loss of the user's own: -(1 - p)^2 log p (Lin et al. 2017, arXiv 1708.02002, equation
    4)."""
    log_share = functional.log_softmax(outputs, 1).gather(1, y[:, None])[:, 0]
    return -((1 - log_share.exp()) ** 2 * log_share).mean()


def own_loss() -> Case:
    module = nn.Sequential(nn.Linear(6, 12), nn.Mish(), nn.Linear(12, 4))
    return case(module, focal, numbers(6), classes(4), metrics={"accuracy": accuracy})


def dropout() -> Case:
    """Between layers, of whole channels, and inside a recurrent layer."""
    module = nn.Sequential(
        nn.Conv1d(3, 6, 3),
        nn.Dropout1d(0.3),
        nn.ReLU(),
        nn.Dropout(0.2),
        Recurrent(nn.GRU(6, 5, num_layers=2, dropout=0.4, batch_first=True), 4),
    )
    return classifier(module, numbers(3, 8), 4)


MODELS: dict[str, Callable[[], Case]] = {
    "softmax": softmax,
    "mlp": mlp,
    "mcmahan": mcmahan,
    "lenet": lenet,
    "resnet8-batchnorm": lambda: resnet8(nn.BatchNorm2d),
    "resnet8-groupnorm": lambda: resnet8(lambda channels: nn.GroupNorm(4, channels)),
    "inverted-residual": inverted_residual,
    "dilated": dilated,
    "convolutions": convolutions,
    "transposed": transposed,
    "pools": pools,
    "gru": gru,
    "lstm": lstm,
    "transformer": transformer,
    "vit": vit,
    "unet": unet,
    "autoencoder": autoencoder,
    "embedding-bag": embedding_bag,
    "two-heads": two_heads,
    "tied": tied,
    "own-loss": own_loss,
    "dropout": dropout,
}
NAMES = tuple(MODELS)


def make(name: str) -> Case:
    """The case of this name, its module with the same initial weights each time, in training
    mode."""
    if name not in MODELS:
        raise ValueError(f"model {name!r}; expected one of {', '.join(NAMES)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MODELS[name]()
