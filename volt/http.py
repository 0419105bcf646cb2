"""httpx without its command line: that imports rich and pygments, half of the time that ``import httpx`` takes.

Every command of ours starts a Python of its own, hundreds of them in a wave of new VMs.
"""

from __future__ import annotations

import sys

# None makes its import fail (Python: The import system, "The module cache"), and httpx does without it then.
sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]

import httpx  # noqa: E402

__all__ = ["httpx"]
