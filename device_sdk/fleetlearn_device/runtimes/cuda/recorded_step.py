"""A training step that a GPU recorded: one call has it do all of the step's operators (a CUDA
graph).

Otherwise the host launches each operator of each step, some 7 us each; these launches are most of a
small model's time. A recorded step reads and writes fixed places of the GPU's memory, is for one
number of examples, and has no operator on the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from numpy.typing import NDArray

from fleetlearn_device.runtimes.checks import Arrays
from fleetlearn_device.runtimes.import_onnxruntime import import_onnxruntime
from fleetlearn_device.runtimes.providers import Tensors, allocate
from fleetlearn_device.runtimes.sessions import run

Named = Mapping[str, NDArray[Any]]
"""Arrays in the host's memory, by the graph's names."""


def records_two_steps() -> bool:
    """Return whether this ONNX Runtime keeps more than one recording of a session: since 1.18."""
    major, minor = import_onnxruntime().__version__.split(".")[:2]
    return (int(major), int(minor)) >= (1, 18)


def check_read_in(session: Any, memory: str, names: Iterable[str]) -> None:
    """Raise ValueError unless the session reads these inputs in that memory, by ONNX Runtime's name
    for it.

    An operator may read one on the host, such as the bounds of Clip. A recorded step would go on
    with the first value.
    """
    if not hasattr(session, "get_input_memory_infos"):  # since 1.23
        return
    infos = zip(session.get_inputs(), session.get_input_memory_infos(), strict=True)
    places = {value.name: info.name.lower() for value, info in infos}
    if elsewhere := [name for name in names if places[name] != memory]:
        raise ValueError(
            f"inputs {elsewhere} are not read in {memory}'s memory: the step cannot be recorded"
        )


class RecordedStep:
    """Steps from one buffer of parameters and state to the other, and back.

    The first step in each direction is recorded. ONNX Runtime runs it several times for that; a
    step reads one buffer and writes the other, so each time gives the same.
    """

    def __init__(
        self,
        session: Any,
        file: str,
        memory: str,
        buffers: tuple[Tensors, Tensors],
        fixed: Mapping[str, Any],
        batch: Named,
        scalars: Named,
        results: Named,
    ) -> None:
        """session: made to be recorded, for the batch's number of examples. memory: ONNX Runtime's
        name of the memory that the session computes in. fixed: OrtValues in that memory; they never
        move. scalars: read when a step begins. results: scalars, set when a step ends.
        """
        self.examples = len(next(iter(batch.values())))
        self._session, self._file, self._scalars, self._results = session, file, scalars, results
        self._batch_values, self._scalar_values, self._result_values = (
            {name: allocate(array.shape, array.dtype, memory) for name, array in arrays.items()}
            for arrays in (batch, scalars, results)
        )
        self._last_sent: dict[str, float] = {}
        """The scalars that are in that memory: most stay the same from step to step."""
        self._turns = {}
        """The buffer that is read (its id) -> what a run is given."""
        for number, (read, write) in enumerate((buffers, buffers[::-1])):
            binding, options = session.io_binding(), import_onnxruntime().RunOptions()
            # each direction is recorded by itself
            options.add_run_config_entry("gpu_graph_id", str(1 + number))
            for name, value in {
                **fixed,
                **self._batch_values,
                **self._scalar_values,
                **read.values,
            }.items():
                binding.bind_ortvalue_input(name, value)
            written = {f"next.{name}": value for name, value in write.values.items()}
            for name, value in {**self._result_values, **written}.items():
                binding.bind_ortvalue_output(name, value)
            self._turns[id(read)] = binding, options

    def run(self, read: Tensors, arrays: Arrays) -> None:
        """Step on a batch, from one of the buffers to the other. Raises what ONNX Runtime raises,
        or StepError."""
        for value, array in zip(self._batch_values.values(), arrays, strict=True):
            value.update_inplace(array)
        for name, array in self._scalars.items():
            if self._last_sent.get(name) != array.item():
                self._scalar_values[name].update_inplace(array)
                self._last_sent[name] = array.item()
        binding, options = self._turns[id(read)]
        run(self._session, binding, self._file, arrays, wait=True, options=options)
        for name, result in self._results.items():
            result[...] = self._result_values[name].numpy()
