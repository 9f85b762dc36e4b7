"""One position of the drafter's walk: bias, temperature, draw, its log-probability, confidence."""

from pallas_kernels.markov_sample.api import Implementation, kernel_runs, markov_sample
from pallas_kernels.markov_sample.operands import Confidence, Position, Sample

__all__ = [
    "Confidence",
    "Implementation",
    "Position",
    "Sample",
    "kernel_runs",
    "markov_sample",
]
