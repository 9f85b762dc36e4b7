"""Drafters that ship with the package, each beside its card."""
