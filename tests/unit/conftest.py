"""Settings of Hypothesis for all tests: how long an example takes says nothing but how busy the machine is."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")
