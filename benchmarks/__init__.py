"""Measurements, each run by one command; see docs/performance.md."""
