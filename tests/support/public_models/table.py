"""The table of all models. ``make("resnet18")`` gives the same random weights each time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import torch
import zoo

from public_models import from_papers, text_and_speech, vision

PACKAGES = ("torchvision", "transformers", "peft")
"""What the models come from; imported when a model is made."""
TRANSFORMERS: dict[str, Callable[..., zoo.Case]] = {
    "bert": text_and_speech.bert,
    "bert_lora": text_and_speech.bert_lora,
    "distilbert": text_and_speech.distilbert,
    "gpt2": text_and_speech.gpt2,
    "llama": text_and_speech.llama,
    "whisper_encoder": text_and_speech.whisper_encoder,
    "vit": text_and_speech.vit,
}
DEPTHS = {
    "bert": 12,
    "bert_lora": 12,
    "distilbert": 6,
    "gpt2": 12,
    "llama": 30,
    "whisper_encoder": 4,
    "vit": 12,
}
"""Layers of the whole models. All layers are alike, so two of them show what there is to see, but
for the size."""

WHOLE: dict[str, Callable[..., zoo.Case]] = {
    f"{name}_whole": partial(TRANSFORMERS[name], layers) for name, layers in DEPTHS.items()
}
MODELS: dict[str, Callable[..., zoo.Case]] = {
    **{name: partial(vision.classifier, name) for name in vision.CLASSIFIERS},
    "deeplabv3_mobilenet_v3_large": vision.deeplabv3_mobilenet_v3_large,
    **{name: partial(function, 2) for name, function in TRANSFORMERS.items()},
    "ds_cnn": from_papers.ds_cnn,
    "rnnt_lstm": from_papers.rnnt_lstm,
    "shakespeare": from_papers.shakespeare,
    "unet": from_papers.unet,
    **WHOLE,
}

MANY_PARAMETERS = 20_000_000
LARGE = {
    *("resnet34", "resnet50", "convnext_tiny", "vit_b_16", "swin_t", "rnnt_lstm"),
    *("bert", "bert_lora", "distilbert", "gpt2", "llama"),
    *(name for name in WHOLE if name != "whisper_encoder_whole"),
}
"""Those with more than MANY_PARAMETERS, frozen ones too. Their exports take longer and more
memory."""


def missing_packages() -> list[str]:
    return [name for name in PACKAGES if find_spec(name) is None]


def make(name: str, pretrained: bool = False) -> zoo.Case:
    """Return a model with its loss and batches.

    pretrained: the package's own weights, which it downloads; those ``from_papers`` have none.
    Raises ValueError.
    """
    if name not in MODELS:
        raise ValueError(f"model {name!r}; expected one of {', '.join(MODELS)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MODELS[name](pretrained=True) if pretrained else MODELS[name]()
