"""Where the chunk store's program is."""

from __future__ import annotations

from drivers.host.command import beside_python, tool
from drivers.needs import VIRTMAN_CHUNKD


def program() -> str:
    """The absolute path: where pip installs the program, beside Python, else on PATH. Raises ToolMissing."""
    return beside_python(VIRTMAN_CHUNKD.name) or tool(VIRTMAN_CHUNKD.name)
