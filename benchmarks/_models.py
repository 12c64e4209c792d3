"""The models of step.py: those of the tests' zoo that have the sizes that people use, some that
people bring, and batches for them."""

from __future__ import annotations

import json
import sys
from fnmatch import fnmatch
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "tests/support"))
import zoo
from public_models import table
from torch import nn

BATCH = 20
BATCHES = 10
OF_THE_ZOO = {
    "softmax": 4000,
    "mlp": 2000,
    "mcmahan": 60,
    "inverted-residual": 100,
    "gru": 300,
    "transformer": 300,
}
PUBLIC = {
    "ds_cnn": 60,
    "shakespeare": 10,
    "squeezenet1_1": 30,
    "mobilenet_v2": 10,
    "mobilenet_v3_small": 20,
    "resnet18": 10,
}
"""On images of 64 x 64, or 80 characters. torchvision makes all but the first two."""
STEPS = {**OF_THE_ZOO, **PUBLIC, "mobilenet_v3_small_head": 60, "bert_lora": 10}
"""How many make a good measurement."""
HEADS = {"mobilenet_v3_small_head": ("mobilenet_v3_small", "classifier.*")}
"""Model that is frozen except for its head -> the whole model, and the names of the head's
parameters."""


def make(name: str) -> zoo.Case:
    """Return the model. What is frozen is so in PyTorch's way: ``requires_grad``, and evaluation
    mode."""
    if name in OF_THE_ZOO:
        return zoo.make(name)
    whole, head = HEADS.get(name, (name, None))
    case = table.make(whole)
    if head is not None:
        for parameter, value in case.module.named_parameters():
            value.requires_grad_(fnmatch(parameter, head))
        for module in case.module.modules():
            module.train(any(value.requires_grad for value in module.parameters()))
    return case


def write_batches(name: str, file: Path, size: int = BATCH) -> None:
    """Random ones of ``size``: one array for each of the batch's, with the batches on the first
    axis."""
    case = make(name)
    drawn = [case.batch(size, seed) for seed in range(BATCHES)]
    np.savez(
        file,
        *(np.stack([value.numpy() for value in values]) for values in zip(*drawn, strict=True)),
    )


def write_layers(name: str, file: Path) -> bool:
    """Write a chain of layers as ``_step_peers.mnn`` reads it. Returns whether the model is one."""
    layers, kinds, values = make(name).module, [], []
    for layer in layers if isinstance(layers, nn.Sequential) else [layers]:
        if isinstance(layer, nn.Conv2d) and layer.groups == 1:
            sizes = layer.kernel_size, layer.stride, layer.padding
            kinds.append(["conv", layer.in_channels, layer.out_channels, *map(list, sizes)])
        elif isinstance(layer, nn.Linear):
            kinds.append(["linear", layer.in_features, layer.out_features])
        elif isinstance(layer, nn.MaxPool2d):
            kinds.append(["pool", [layer.kernel_size] * 2, [layer.stride] * 2])
        elif isinstance(layer, nn.ReLU | nn.Flatten):
            kinds.append(["relu" if isinstance(layer, nn.ReLU) else "flatten"])
        else:
            return False
        values += [value.detach().numpy() for value in layer.parameters()]
    np.savez(file, np.array(json.dumps(kinds)), *values)
    return True
