"""What to do about errors that PyTorch raises in a user's model or loss, and whose text does not
say it."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from typing import NamedTuple


class Advice(NamedTuple):
    """What an error's text means for a model that is exported."""

    pattern: str
    """A regular expression that is found in the error's text."""
    cause: str
    """What the error means, and what to write instead."""
    through: str = ""
    """A regular expression of PyTorch's files: an error that passed through one of them means the
    same, whatever its text. Empty: there is none."""


ADVICE: Sequence[Advice] = (
    Advice(
        r"HigherOrderOperator (cond|while_loop|scan|associative_scan|map_impl)\b",
        "torch.cond and its relatives choose what is computed by the values of tensors, and a "
        "graph takes one way for all data: compute both ways, and choose between the results with "
        "torch.where",
        # PyTorch compiles both ways before it runs one, and fails there in many words.
        r"torch._higher_order_ops.(cond|while_loop|scan|associative_scan|map)\.py$",
    ),
    Advice(
        r"got Double and Float|got Float and Double|but found Double|expected scalar type "
        r"Float|input.*double",
        "an array of the example is float64, NumPy's default, and the parameters are float32: "
        "convert the array, with array.astype(numpy.float32) or tensor.float()",
    ),
    Advice(
        r"argument '\w+' .*must be Tensor, not (?!None|str|int|float)",
        "the model returns several outputs together, and loss= and metrics get them as they are: "
        "write functions that take what they need, such as lambda outputs, y: "
        'cross_entropy(outputs[0], y), or outputs["logits"] of a dict',
    ),
    Advice(
        r"expected target dtype to be Long|Target -?\d+ is out of bounds",
        "cross_entropy's labels are the numbers of classes, integers from 0 to the number of the "
        "model's outputs minus 1: convert with array.astype(numpy.int64), and look at how many "
        "outputs the model's last layer has",
    ),
    Advice(
        r"\w+_softmax\w* not implemented for '(Long|Int)'|_softmax_\w+\W+not implemented for '",
        "a softmax of integers: loss= and metrics are called with the model's outputs first, then "
        "the labels",
    ),
    Advice(
        r"must have the same dtype, but got (Long|Int|Byte|Char)",
        "an array of the example holds integers, and a layer of the model takes float32: convert "
        "it, with array.astype(numpy.float32) or tensor.float()",
    ),
    Advice(
        r"result type Float can't be cast to the desired output type Long",
        "this loss takes labels as float32, as those of probabilities and numbers do: convert "
        "them, with array.astype(numpy.float32) or tensor.float()",
    ),
    Advice(
        r"mat1 and mat2 shapes cannot be multiplied",
        "a row of the example has not as many values as a layer takes (the first number of "
        "torch.nn.Linear): look at the shapes of the example's arrays, or flatten them in forward",
    ),
    Advice(
        r"does not require grad and does not have a grad_fn",
        "the model or its loss differentiates (torch.autograd.grad or backward) while no gradients "
        "are recorded. An evaluation runs under torch.no_grad(), on every device too: put the "
        "lines that differentiate, and those that compute what they differentiate, into `with "
        "torch.enable_grad():`",
    ),
    Advice(
        r"found at least two devices, meta and cpu",
        "forward replaces a tensor's values through .data, which a graph does not see. A network "
        "that follows the trained one (BYOL, a mean teacher) has buffers instead: "
        'docs/start/your-own-model.md, "A network that follows the trained one"',
    ),
)


def cause_of(error: BaseException) -> str | None:
    """Return what an error means, and what to write instead; None where nothing is known."""
    text = str(error)
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    for advice in ADVICE:
        passed = advice.through and any(re.search(advice.through, file) for file in files)
        if passed or re.search(advice.pattern, text):
            return advice.cause
    return None
