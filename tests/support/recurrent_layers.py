"""The recurrent layers of PyTorch, each as a function with nn.LSTM's arguments."""

from __future__ import annotations

from typing import Any

from torch import nn

LAYERS: dict[str, Any] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *given, **options: nn.RNN(*given, nonlinearity="relu", **options),
    "projected lstm": lambda *given, **options: nn.LSTM(*given, proj_size=3, **options),
}
