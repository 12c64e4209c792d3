"""Models of transformers with a loss of their own, as people call them: batches that are dicts,
and no loss= at the export. They are tiny: what an exporter needs does not depend on a size."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from fleetlearn_device import open_runtime
from fleetlearn_export import export_bundle
from fleetlearn_protocol.manifest import INFER
from fleetlearn_protocol.vector import views
from public_models.table import missing_packages
from torch import Tensor

pytestmark = [
    pytest.mark.zoo,
    pytest.mark.slow,
    pytest.mark.skipif(
        "transformers" in missing_packages(),
        reason="transformers is not installed: `make test-zoo` does that",
    ),
]
VOCABULARY, LENGTH, LABELS = 50, 12, 3


def texts(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw words and the attention mask, int64 (n, LENGTH)."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (n, 1), generator=random)
    words = torch.randint(2, VOCABULARY, (n, LENGTH), generator=random)
    return words, (torch.arange(LENGTH) < lengths).long()


def make(name: str, **config: Any) -> Any:
    cls = getattr(import_module("transformers"), name)
    torch.manual_seed(0)
    return cls(cls.config_class(vocab_size=VOCABULARY, **config))


def bert() -> Any:
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    widths = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    sizes = {"num_hidden_layers": 1, "max_position_embeddings": 16, "num_labels": LABELS}
    return make("BertForSequenceClassification", **no_dropout, **widths, **sizes)


def gpt2() -> Any:
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return make(
        "GPT2LMHeadModel", n_embd=16, n_layer=1, n_head=2, n_positions=16, **no_dropout, **ends
    )


def t5() -> Any:
    widths = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    ends = {"decoder_start_token_id": 0, "pad_token_id": 0}
    return make("T5ForConditionalGeneration", dropout_rate=0.0, **widths, **ends)


def classified(n: int, seed: int) -> dict[str, Tensor]:
    words, mask = texts(n, seed)
    return {"input_ids": words, "attention_mask": mask, "labels": words[:, 0] % LABELS}


def continued(n: int, seed: int) -> dict[str, Tensor]:
    words, mask = texts(n, seed)
    return {"input_ids": words, "labels": words.masked_fill(mask == 0, -100)}


def answered(n: int, seed: int) -> dict[str, Tensor]:
    words, mask = texts(n, seed)
    return {"input_ids": words, "attention_mask": mask, "labels": words.flip(1)}


@pytest.mark.parametrize(
    ("make_model", "draw", "inputs"),
    [
        (bert, classified, ["input_ids", "attention_mask"]),
        (gpt2, continued, ["input_ids"]),
        # its decoder reads the labels, one place later
        (t5, answered, ["input_ids", "attention_mask", "labels"]),
    ],
)
def test_five_steps_match_pytorch(
    make_model: Callable[[], Any],
    draw: Callable[[int, int], dict[str, Tensor]],
    inputs: list[str],
    tmp_path: Path,
) -> None:
    model = make_model()
    exported = export_bundle(model, example=draw(4, 0), path=tmp_path / "b")
    batches = [draw(n, seed) for seed, n in enumerate([6, 3, 1, 6, 2], 1)]
    runtime = open_runtime(exported.bundle.path)
    rows = [{name: value.numpy() for name, value in batch.items()} for batch in batches]
    losses = [runtime.step(row, lr=0.1) for row in rows]

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()
    curve = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    assert losses == pytest.approx(curve, abs=1e-4)
    after = dict(model.named_parameters())
    for name, value in views(runtime.parameters, exported.bundle.manifest.parameters).items():
        np.testing.assert_allclose(value, after[name].detach().numpy(), atol=1e-4)

    session = onnxruntime.InferenceSession(exported.bundle.path / INFER)
    assert [row.name for row in session.get_inputs()] == inputs
    assert session.get_outputs()[0].name == "output_logits"
