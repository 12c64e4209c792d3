"""Metrics as text for Prometheus, by prometheus-client."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client import ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from fleetlearn_coordinator.service.monitoring.catalogue import (
    CATALOGUE,
    HistogramValue,
    MetricSpec,
    Sample,
    Samples,
)

_FAMILIES: dict[str, Any] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}
_process = ProcessCollector(registry=None)


def encode(samples: Samples, accept: str) -> tuple[bytes, str]:
    """Return the text and its content type. ``accept``: the request's header, which says whether
    the scraper reads OpenMetrics. Safe to call in any thread."""
    encoder, content_type = choose_encoder(accept)
    return encoder(_Collected(samples)), content_type


class _Collected:
    """What prometheus-client asks for all metrics."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def collect(self) -> Iterator[Metric]:
        for spec in CATALOGUE:
            yield _family(spec, self._samples.get(spec.name, ()))
        yield from _process.collect()


def _family(spec: MetricSpec, samples: Sequence[Sample]) -> Metric:
    family = _FAMILIES[spec.kind](spec.name, spec.help, labels=spec.labels)
    for labels, value in samples:
        if isinstance(value, HistogramValue):
            family.add_metric(labels, buckets=value.buckets, sum_value=value.total)
        else:
            family.add_metric(labels, value)
    assert isinstance(family, Metric)
    return family
