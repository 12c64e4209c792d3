"""One ONNX file of a vertical run's bottoms and top."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fleetlearn_protocol.errors import Code, FleetError
from fleetlearn_protocol.manifest import Cut
from fleetlearn_protocol.vertical.joined_model import PartModel, joined_model, origin_of


def whole_model(cuts: Sequence[Cut], files: Mapping[str, bytes], top: bytes, step: int) -> bytes:
    """Return an ONNX file that computes the model's outputs from the arrays of all parties.

    cuts: those of the top. files: name -> what a party's `export-bottom` wrote. top: the top's
    file, after this many steps. Raises FleetError unless the files are the bottoms of all parties,
    after the same step.
    """
    found: dict[str, bytes] = {}
    for name, content in files.items():
        try:
            origin = origin_of(content)
        except ValueError as error:
            raise _misfit(f"{name} is no ONNX file: {error}") from None
        party = next((cut.party for cut in cuts if origin and origin.bundle == cut.bundle), None)
        if origin is None or party is None:
            raise _misfit(
                f"{name} is no bottom of this run: expected what `fleetlearn-device export-bottom` "
                "writes, from the bundles with which the top was exported"
            )
        if origin.step != step:
            raise _misfit(
                f"{name} is the bottom of {party} after step {origin.step}, and the top is that "
                f"after step {step}: parts of one model are of one step. Export them when the "
                "training is over"
            )
        if party in found:
            raise _misfit(f"{name} is a second file of the bottom of {party}")
        found[party] = content
    absent = [cut.party for cut in cuts if cut.party not in found]
    if absent:
        raise _misfit(
            f"the bottom of {', '.join(absent)} is missing: give --bottom once for each party"
        )
    parts = [PartModel(cut.party, found[cut.party]) for cut in cuts]
    takes = {cut.party: cut.activations.name for cut in cuts}
    try:
        return joined_model(parts, takes, top)
    except ValueError as error:
        raise _misfit(f"the parts do not fit together: {error}") from None


def _misfit(text: str) -> FleetError:
    return FleetError(Code.BAD_MESSAGE, text)
