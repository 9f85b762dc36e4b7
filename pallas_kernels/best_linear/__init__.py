"""The best token of every row of a language-model head, whose logits are never written."""

from pallas_kernels.best_linear.api import Implementation, avoids_logits, best_linear
from pallas_kernels.best_linear.reference import best_token

__all__ = ["Implementation", "avoids_logits", "best_linear", "best_token"]
