"""Torchvision's models, with their own widths and number of classes, on small images."""

from __future__ import annotations

from typing import Any

import zoo
from torch import Tensor
from torch.nn import functional

from public_models.import_torchvision import torchvision

CLASSES = 1000
SIDE = 64
"""Pixels of an image's side: the operators, and hence the export, are those of 224 x 224."""

CLASSIFIERS: dict[str, dict[str, Any]] = {
    "resnet18": {},
    "resnet34": {},
    "resnet50": {},
    "mobilenet_v2": {},
    "mobilenet_v3_small": {},
    "mobilenet_v3_large": {},
    "squeezenet1_1": {},
    "shufflenet_v2_x0_5": {},
    "mnasnet0_5": {},
    "efficientnet_b0": {},
    "convnext_tiny": {},
    "densenet121": {},
    "regnet_y_400mf": {},
    "vit_b_16": {"image_size": SIDE},
    "swin_t": {},
}
"""Name -> arguments. A Vision Transformer has a vector for each place of an image, so it must know
the image's size."""


def classifier(name: str, pretrained: bool = False) -> zoo.Case:
    """Classify images, float32 (n, 3, SIDE, SIDE). ``pretrained``: ImageNet's weights, which are
    downloaded.

    A pretrained Vision Transformer takes images of 224 x 224.
    """
    options = {"weights": "DEFAULT"} if pretrained else CLASSIFIERS[name]
    module = torchvision().models.get_model(name, **options)
    side = getattr(module, "image_size", SIDE)
    return zoo.classifier(module, zoo.numbers(3, side, side), CLASSES)


def deeplabv3_mobilenet_v3_large(pretrained: bool = False) -> zoo.Case:
    """Segment images, float32 (n, 3, SIDE, SIDE): one of 21 classes for each pixel."""
    weights = {"weights": "DEFAULT"} if pretrained else {"weights": None, "weights_backbone": None}
    module = torchvision().models.segmentation.deeplabv3_mobilenet_v3_large(**weights)
    return zoo.case(module, pixels, zoo.numbers(3, SIDE, SIDE), zoo.classes(21, SIDE, SIDE))


def pixels(outputs: dict[str, Tensor], y: Tensor) -> Tensor:
    return functional.cross_entropy(outputs["out"], y)
