"""Verification of drafts: filtered target distributions and rejection sampling."""
