"""The exporter's one exception, and where in the user's code something happened."""

from __future__ import annotations


class ExportError(Exception):
    """The model, its loss, its metrics or the example cannot become a training bundle: what, where, what to do."""
