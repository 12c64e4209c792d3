"""The exporter's one exception."""


class ExportError(Exception):
    """The model, its loss, its metrics or the example cannot become a training bundle. The text
    says what to do."""
