"""Takes the shared models that reach the device into use: each new one, or, with a local hold-out,
the better one alone."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from math import isfinite

import msgspec
from fleetlearn_protocol.bundle import Bundle
from fleetlearn_protocol.encodings import find_encoding
from fleetlearn_protocol.errors import FleetError
from fleetlearn_protocol.frames import Buffer
from fleetlearn_protocol.messages import VectorReference
from fleetlearn_protocol.user_errors import ANY_FAILURE, failure, in_one_line
from fleetlearn_protocol.vector import Vector

from fleetlearn_device.storage.errors import StateError
from fleetlearn_device.storage.model_in_use import ModelInUse, ModelsInUse

log = logging.getLogger("fleetlearn.device")

Measure = Callable[[Vector], float | None]
"""(a shared model, float32, shape (P,)) -> its mean loss on the local hold-out; None: there is no
hold-out."""


class NewestModel:
    """Decides which shared model the device uses.

    models: where it is kept. on_better: called with the model in use, in the thread that trains,
    each time that it is another one.
    """

    def __init__(
        self, models: ModelsInUse, on_better: Callable[[ModelInUse], object] | None = None
    ) -> None:
        self._models, self._on_better = models, on_better
        self._current = models.current()

    def offer(
        self, bundle: Bundle, reference: VectorReference, content: Buffer, measure: Measure
    ) -> bool:
        """A shared model is there. Take it into use, if it is better. Returns whether it was taken.

        A model of another bundle than before is always taken. What goes wrong is said in the log:
        training must not be lost for it.
        """
        before = self._current
        if before is not None and before.model == reference.sha256:
            return False
        try:
            loss = measure(find_encoding(reference.encoding).decode(content))
            if before is not None and before.bundle == bundle.sha256 and loss is not None:
                before_loss = self._measured_again(measure)
                # Written so that NaN, which is not below, is not better either.
                if before_loss is not None and not loss < before_loss:
                    log.info(
                        "the model that came is not better on the local hold-out (loss %.6g; the "
                        "one in use %.6g): that one stays in use",
                        loss,
                        before_loss,
                    )
                    return False
            model = ModelInUse(
                bundle.sha256,
                bundle.manifest.name,
                reference.sha256,
                reference.encoding,
                time.time(),
                loss if loss is not None and isfinite(loss) else None,
            )
            self._models.take(model, content, bundle)
        except (FleetError, StateError, ValueError, MemoryError) as error:
            log.warning("the model that came cannot be taken into use: %s", in_one_line(error))
            return False
        self._current = model
        log.info("model %s of bundle %s is in use", model.model[:12], model.name)
        self._tell(model)
        return True

    def _measured_again(self, measure: Measure) -> float | None:
        """Return the loss of the model in use on the hold-out as it is now; None where it cannot be
        had."""
        found = self._models.vector()
        if found is None:
            return None
        loss = measure(found)
        assert self._current is not None
        self._current = msgspec.structs.replace(self._current, loss=loss)
        return loss

    def _tell(self, model: ModelInUse) -> None:
        if self._on_better is None:
            return
        try:
            self._on_better(model)
        except ANY_FAILURE as error:  # the user's code
            log.warning("%s", failure("on_better_model", error))
