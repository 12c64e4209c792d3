"""A training step that a GPU recorded: one call has it do all of the step's operators (a CUDA graph).

Otherwise the host launches each operator of each step, some 7 us each, which is most of a small model's time. A
recorded step reads and writes fixed places of the GPU's memory, is for one number of examples, and has no operator on
the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from fleetlearn_device.runtimes.checks import Arrays
from fleetlearn_device.runtimes.import_onnxruntime import import_onnxruntime
from fleetlearn_device.runtimes.providers import Tensors, allocate
from fleetlearn_device.runtimes.sessions import run

Named = Mapping[str, NDArray[Any]]
"""Arrays in the host's memory, by the graph's names."""


class RecordedStep:
    """Steps from one buffer of parameters and state to the other, and back.

    The first step in each direction is recorded. ONNX Runtime runs it several times for that; a step reads one buffer
    and writes the other, so each time gives the same.
    """

    def __init__(
        self,
        session: Any,
        file: str,
        buffers: tuple[Tensors, Tensors],
        fixed: Mapping[str, Any],
        batch: Named,
        scalars: Named,
        results: Named,
    ) -> None:
        """session: made to be recorded, for the batch's number of examples. fixed: OrtValues, in the memory that it
        computes in, that stay where they are. scalars: read when a step begins. results: scalars, set when it ends.
        """
        self.examples = len(next(iter(batch.values())))
        self._session, self._file, self._scalars, self._results = session, file, scalars, results
        memory = next(iter(buffers[0].values.values())).device_name()
        self._batch, self._given, self._found = (
            {name: allocate(array.shape, array.dtype, memory) for name, array in arrays.items()}
            for arrays in (batch, scalars, results)
        )
        self._sent: dict[str, float] = {}
        """The scalars that are there: most stay the same from step to step."""
        self._turns = {}
        """The buffer that is read (its id) -> what a run is given."""
        for number, (read, write) in enumerate((buffers, buffers[::-1])):
            binding, options = session.io_binding(), import_onnxruntime().RunOptions()
            options.add_run_config_entry("gpu_graph_id", str(1 + number))  # each direction is recorded by itself
            for name, value in {**fixed, **self._batch, **self._given, **read.values}.items():
                binding.bind_ortvalue_input(name, value)
            written = {f"next.{name}": value for name, value in write.values.items()}
            for name, value in {**self._found, **written}.items():
                binding.bind_ortvalue_output(name, value)
            self._turns[id(read)] = binding, options

    def run(self, read: Tensors, arrays: Arrays) -> None:
        """Step on a batch, from one of the buffers to the other. Raises StepError, MemoryError."""
        for value, array in zip(self._batch.values(), arrays, strict=True):
            value.update_inplace(array)
        for name, array in self._scalars.items():
            if self._sent.get(name) != array.item():
                self._given[name].update_inplace(array)
                self._sent[name] = array.item()
        binding, options = self._turns[id(read)]
        run(self._session, binding, self._file, arrays, wait=True, options=options)
        for name, result in self._results.items():
            result[...] = self._found[name].numpy()
