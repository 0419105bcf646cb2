"""Tests below ``inside`` run in the guests, by test_inside."""

collect_ignore = ["inside"]
