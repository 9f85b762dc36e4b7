"""Load on an engine: every fixed setting and the adaptive ones, over the same prompts."""
