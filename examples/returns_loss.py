"""A model that computes its own loss, as those of transformers do, exported as it is and trained.

python examples/returns_loss.py commands.bundle

The model is called as ``model(input_ids=..., attention_mask=..., labels=...)`` and returns a
dataclass with ``loss`` and ``logits``. One of transformers, such as
``BertForSequenceClassification``, takes its place without another change.
"""

import sys
from dataclasses import dataclass

import numpy as np
import torch
from fleetlearn_device import open_runtime
from fleetlearn_export import LocalStep, export_bundle
from numpy.typing import NDArray
from torch import Tensor, nn

COMMANDS = [("light", "lamp", "bright"), ("music", "song", "louder"), ("heat", "warm", "degrees")]
OTHERS = ("please", "the", "make", "it", "turn", "now", "more", "in", "here")
WORDS = ["", *OTHERS, *(word for words in COMMANDS for word in words)]
LENGTH = 6


def spoken(n: int, seed: int) -> dict[str, NDArray[np.int64]]:
    """``n`` commands as a tokenizer gives them, int64 (n, LENGTH), and what each is about."""
    random = np.random.default_rng(seed)
    labels = random.integers(len(COMMANDS), size=n)
    ids, mask = np.zeros((2, n, LENGTH), np.int64)
    for row, label in enumerate(labels):
        length = random.integers(2, LENGTH + 1)
        words = [random.choice(COMMANDS[label]), *random.choice(OTHERS, length - 1)]
        random.shuffle(words)
        ids[row, :length] = [WORDS.index(word) for word in words]
        mask[row, :length] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(len(WORDS), 16)
        self.head = nn.Linear(16, len(COMMANDS))

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None
    ) -> Output:
        weights = attention_mask / attention_mask.sum(1, keepdim=True)
        logits = self.head((self.words(input_ids) * weights[..., None]).sum(1))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return Output(logits, loss)


def accuracy(outputs: Output, labels: Tensor) -> Tensor:
    return (outputs.logits.argmax(1) == labels).float()


def main(path: str) -> float:
    """Export, train 60 steps without PyTorch, and return the accuracy on other commands."""
    torch.manual_seed(0)
    example = spoken(4, seed=0)
    step = LocalStep("adamw")
    export_bundle(
        Classifier(), example=example, path=path, step=step, metrics={"accuracy": accuracy}
    )
    runtime = open_runtime(path)
    for seed in range(1, 61):
        runtime.step(spoken(32, seed), lr=0.05)
    found = runtime.evaluate(spoken(200, seed=99))
    return found.metric_sums["accuracy"] / found.examples


if __name__ == "__main__":
    print(f"accuracy on commands that it has not seen: {main(sys.argv[1]):.2f}")
