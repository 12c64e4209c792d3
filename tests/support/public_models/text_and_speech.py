"""Models of transformers, and PEFT's LoRA on one of them, with the widths that people use.

``layers`` is the depth; with ``pretrained`` weights, which are downloaded, the model has its own.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import zoo
from torch import Tensor
from torch.nn import functional

from public_models.import_torchvision import torchvision

WORDS = 32
"""Tokens of a text."""
SECONDS = 6
"""Length of an utterance. Whisper's own are padded to 30 seconds."""


def class_loss(outputs: Any, y: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.logits, y)


def token_loss(outputs: Any, y: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.logits.flatten(0, 1), y.flatten())


def padding(n: int, random: torch.Generator) -> Tensor:
    """Draw the attention mask of ``n`` texts of different lengths: int64 (n, WORDS), 1 for a token,
    0 for padding."""
    lengths = torch.randint(WORDS // 2, WORDS + 1, (n, 1), generator=random)
    return (torch.arange(WORDS) < lengths).long()


def package(name: str) -> ModuleType:
    """Import transformers or peft. Both import torchvision wherever it is installed, so that has to
    work first."""
    torchvision()
    return import_module(name)


def make(kind: str, name: str, pretrained: bool, **config: Any) -> Any:
    """Return transformers' model of class ``kind``: with random weights, or the hub's model
    ``name``."""
    cls = getattr(package("transformers"), kind)
    return cls.from_pretrained(name) if pretrained else cls(cls.config_class(**config))


def classifier(module: Any, *draws: Any) -> zoo.Case:
    return zoo.case(module, class_loss, *draws, zoo.classes(module.config.num_labels))


def language_model(module: Any) -> zoo.Case:
    module.config.use_cache = False  # keys and values of earlier calls, which are not tensors
    vocabulary = module.config.vocab_size
    return zoo.case(
        module, token_loss, zoo.classes(vocabulary, WORDS), zoo.classes(vocabulary, WORDS)
    )


def bert_module(layers: int, pretrained: bool) -> Any:
    """Return BERT-base (Devlin et al. 2018, arXiv 1810.04805) with a head for four classes."""
    name = "google-bert/bert-base-uncased"
    return make(
        "BertForSequenceClassification", name, pretrained, num_hidden_layers=layers, num_labels=4
    )


def bert(layers: int, pretrained: bool = False) -> zoo.Case:
    return classifier(bert_module(layers, pretrained), zoo.classes(30522, WORDS), padding)


def bert_lora(layers: int, pretrained: bool = False) -> zoo.Case:
    """BERT, frozen, with LoRA's matrices (Hu et al. 2021, arXiv 2106.09685) and a head, which are
    trained."""
    module = bert_module(layers, pretrained)
    peft = package("peft")
    rule = peft.LoraConfig(
        task_type="SEQ_CLS", r=8, lora_alpha=16, target_modules=["query", "value"]
    )
    module = peft.get_peft_model(module, rule)
    return classifier(module, zoo.classes(30522, WORDS), padding)


def distilbert(layers: int, pretrained: bool = False) -> zoo.Case:
    """DistilBERT (Sanh et al. 2019, arXiv 1910.01108)."""
    name = "distilbert/distilbert-base-uncased"
    module = make(
        "DistilBertForSequenceClassification", name, pretrained, n_layers=layers, num_labels=4
    )
    return classifier(module, zoo.classes(30522, WORDS), padding)


def gpt2(layers: int, pretrained: bool = False) -> zoo.Case:
    """The smallest GPT-2 (Radford et al. 2019)."""
    return language_model(
        make("GPT2LMHeadModel", "openai-community/gpt2", pretrained, n_layer=layers)
    )


def llama(layers: int, pretrained: bool = False) -> zoo.Case:
    """SmolLM-135M, a Llama: rotary positions, and three heads of keys for nine of queries."""
    widths = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    name = "HuggingFaceTB/SmolLM-135M"
    return language_model(
        make("LlamaForCausalLM", name, pretrained, num_hidden_layers=layers, **widths, **heads)
    )


def whisper_encoder(layers: int, pretrained: bool = False) -> zoo.Case:
    """The encoder of Whisper-tiny (Radford et al. 2022, arXiv 2212.04356): float32 (n, 80 mel
    bands, 100 a second)."""
    widths = {"d_model": 384, "encoder_attention_heads": 6, "encoder_ffn_dim": 1536}
    sizes = {"encoder_layers": layers, "max_source_positions": 50 * SECONDS, "num_labels": 12}
    module = make(
        "WhisperForAudioClassification", "openai/whisper-tiny", pretrained, **widths, **sizes
    )
    return classifier(module, zoo.numbers(80, 2 * module.config.max_source_positions))


def vit(layers: int, pretrained: bool = False) -> zoo.Case:
    """ViT-base (Dosovitskiy et al. 2020, arXiv 2010.11929) on images of 224 x 224."""
    name = "google/vit-base-patch16-224"
    module = make(
        "ViTForImageClassification", name, pretrained, num_hidden_layers=layers, num_labels=10
    )
    return classifier(module, zoo.numbers(3, 224, 224))
