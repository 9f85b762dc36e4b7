"""The semi-autoregressive block drafter and its heads."""
