"""Where the agent may be cut off.

The agent names each step of an operation as it reaches it. In production nobody listens but the debug log; a test
listens and kills the process there, to prove that the next start repairs what was left.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

Step = Callable[[str], None]

log = logging.getLogger(__name__)


def log_step(step: str) -> None:
    """The default listener."""
    log.debug("step %s", step)
