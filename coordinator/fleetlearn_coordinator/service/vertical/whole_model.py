"""One ONNX file of bottoms and top."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fleetlearn_protocol import write_inference_model
from fleetlearn_protocol.errors import Code, FleetError
from fleetlearn_protocol.manifest import Cut
from fleetlearn_protocol.vertical.joined_model import PartModel, joined_model, origin_of
from fleetlearn_protocol.vertical.kept_part import KeptPart

from fleetlearn_coordinator.service.vertical.round_model import WholeModel
from fleetlearn_coordinator.service.vertical.rounds_settings import SplitParts


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
    return _joined(cuts, [PartModel(cut.party, found[cut.party]) for cut in cuts], top)


def split_model(parts: SplitParts, kept: KeptPart) -> bytes:
    """Return an ONNX file of a split run's model, whose checkpoint this is. Raises FleetError."""
    model = WholeModel.initial(parts.bottom, parts.top).of_part(kept)
    bottom = write_inference_model(parts.bottom, model.bottom)
    top = write_inference_model(parts.top, model.top)
    return _joined([parts.cut], [PartModel(parts.cut.party, bottom)], top)


def _joined(cuts: Sequence[Cut], bottoms: Sequence[PartModel], top: bytes) -> bytes:
    takes = {cut.party: cut.activations.name for cut in cuts}
    try:
        return joined_model(bottoms, takes, top)
    except ValueError as error:
        raise _misfit(f"the parts do not fit together: {error}") from None


def _misfit(text: str) -> FleetError:
    return FleetError(Code.BAD_MESSAGE, text)
