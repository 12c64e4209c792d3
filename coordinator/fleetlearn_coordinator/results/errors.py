"""What sending results elsewhere raises."""

from fleetlearn_protocol.errors import Code, FleetError


class ResultsError(FleetError):
    """Results cannot be written as asked. The text says what was given and what to do."""

    def __init__(self, text: str) -> None:
        super().__init__(Code.BAD_MESSAGE, text)
