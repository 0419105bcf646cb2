"""Which names VMs, images and hosts may have. They become parts of paths, URLs, domains and targets."""

from __future__ import annotations

import re

from virtman.errors import BadRequest

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$"


def check_name(what: str, name: str) -> str:
    """The name, if it is allowed. Raises BadRequest."""
    if not re.fullmatch(NAME_PATTERN, name):
        shown = name if len(name) <= 80 else name[:77] + "..."
        raise BadRequest(
            f"{what} name {shown!r}: 1 to 63 letters, digits, '-' and '_' are allowed, the first a letter or digit"
        )
    return name
