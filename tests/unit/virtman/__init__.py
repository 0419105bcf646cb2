"""Tests of the agent's parts, over doubles."""
