"""Which tests pytest was asked for. Guests, which have these tests but not the lab, import it, too."""

selected: list[str] = []
"""Names of tests."""
