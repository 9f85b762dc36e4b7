"""Measurements run by hand; each writes a table and its raw numbers as JSON."""
