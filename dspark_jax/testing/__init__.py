"""Toy targets and drafters for tests."""
