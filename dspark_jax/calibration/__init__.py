"""Confidence calibration: sequential temperature scaling and its metrics."""
