"""The simulator's only error class."""

from fleetlearn_protocol.errors import Code, FleetError


class SimulatorError(FleetError):
    """Raised when something cannot be simulated. The text says what was given, what was expected,
    and what to do."""

    def __init__(self, text: str) -> None:
        super().__init__(Code.BAD_MESSAGE, text)
