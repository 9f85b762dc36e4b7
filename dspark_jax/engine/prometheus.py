"""Figures of an engine in Prometheus's text format, or for a registry of your own."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector

from dspark_jax.engine.figures import Figure, Histogram

PREFIX = "dspark:"
"""Before every name, as peers put theirs."""


class FigureCollector(Collector):
    """Hands current figures to a registry: ``REGISTRY.register(FigureCollector(engine.figures))``.

    Args:
        figures: asked at every scrape.
    """

    def __init__(self, figures: Callable[[], Iterable[Figure]]) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Any]:
        """One metric family a figure."""
        return map(_family, self._figures())


def exposition(figures: Iterable[Figure]) -> str:
    """The text that a scrape wants. Numbers that do not exist yet are left out."""
    fixed = list(figures)
    registry = CollectorRegistry()
    registry.register(FigureCollector(lambda: fixed))
    return generate_latest(registry).decode()


def _family(figure: Figure) -> Any:
    name, meaning = PREFIX + figure.name, f"{figure.meaning} [{figure.unit}]"
    if isinstance(figure.value, Histogram):
        found = figure.value
        names = [*map(str, map(float, found.bounds)), "+Inf"]
        totals = itertools.accumulate(found.counts.tolist())
        buckets = list(zip(names, totals, strict=True))
        return HistogramMetricFamily(name, meaning, buckets=buckets, sum_value=found.sum)
    kind = CounterMetricFamily if figure.kind == "counter" else GaugeMetricFamily
    family = kind(name, meaning, labels=None if figure.label is None else [figure.label])
    value = figure.value
    parts = value.items() if isinstance(value, Mapping) else [(None, value)]
    for part, number in parts:
        if number is not None and not math.isnan(number):
            family.add_metric([] if part is None else [part], number)
    return family
