"""The VirtMan agent of a compute node."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import nova.conf
from nova.virtman.errors import AgentRefused, BaseUnavailable

if TYPE_CHECKING:
    from virtman.client import AgentClient

CONF = nova.conf.CONF
LOG = logging.getLogger(__name__)

Answer = TypeVar("Answer")

_PAUSE, _LONGEST_PAUSE = 0.1, 2.0


def socket_of(node: str) -> Path:
    """Where the agent of a compute node listens."""
    return Path(CONF.virtman.socket.replace("{node}", node))


@contextmanager
def agent_of(node: str) -> Iterator[AgentClient]:
    """A client of the agent of this compute node. The agent's errors in the block become those of ``errors``.

    Raises BaseUnavailable if it is the image's, which all hosts would say, and else AgentRefused.
    """
    # Nova does without VirtMan's package, and what that imports, while both options are off.
    from virtman.client import AgentClient
    from virtman.errors import VirtmanError

    try:
        yield AgentClient(socket_of(node), timeout=CONF.virtman.agent_timeout)
    except VirtmanError as error:
        raise (BaseUnavailable if is_of_base(error) else AgentRefused)(reason=str(error)) from error


def is_of_base(error: Exception) -> bool:
    """Whether other hosts would fail as this one did: it is the base's content, or the base is withdrawn.

    So would those that are set up alike, where ``use_cachegroup`` has no cache group: the server's user reads why, and
    not that no host was left.
    """
    from virtman.errors import BadImageFile, BadSize, ContentChanged, ImageWithdrawn, NoVolumes

    return isinstance(error, BadImageFile | BadSize | ContentChanged | ImageWithdrawn | NoVolumes)


def when_it_has_time(call: Callable[[], Answer]) -> Answer:
    """A call that lasts long, of which the agent lets in only so many at once: the others wait for their turn.

    Raises what it raises, TooManyCalls only after ``agent_timeout``.
    """
    from virtman.errors import TooManyCalls

    end, pause = time.monotonic() + CONF.virtman.agent_timeout, _PAUSE
    while True:
        try:
            return call()
        except TooManyCalls as error:
            if time.monotonic() > end:
                raise
            LOG.info("waiting for the agent's other calls: %s", error)
        time.sleep(pause * random.uniform(0.5, 1))  # noqa: S311  those of a wave do not ask in step
        pause = min(2 * pause, _LONGEST_PAUSE)
