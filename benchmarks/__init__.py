"""Measurements, each run by one command; see docs/operations.md."""
