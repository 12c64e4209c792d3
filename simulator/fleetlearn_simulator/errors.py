"""The one error of the simulator."""

from fleetlearn_protocol.errors import Code, FleetError


class SimulatorError(FleetError):
    """What cannot be simulated. The text says what was given, what was expected and what to do."""

    def __init__(self, text: str) -> None:
        super().__init__(Code.BAD_MESSAGE, text)
