"""Children that may not read any more, and whose sessions are still there.

The kernel removes who may log in to a target by ending the session, and ends a session only when all its commands are
answered: whoever asks for that cannot be killed meanwhile, and nobody else gets to see who may log in (Linux:
core_tpg_del_initiator_node_acl, iscsit_stop_session, under the lock of the folder). A read may wait for as long as
there is no device, or no parent. So a session is ended only when none of its commands waits, and until then somebody
has to look again.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable

from drivers.errors import DriverError
from drivers.host.watch import Watch

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 1.0
"""Seconds between two looks: reads that do not wait for anything are answered within the first."""

_CONNECTION = "Connection State"
_WINDOW = re.compile(r"^ 0x([0-9a-f]{8}) +0x([0-9a-f]{8}) ", re.MULTILINE)
"""How many commands the initiator may have under way, and how many more it may send now: CmdSN/WR and CmdSN/WC."""


def commands_wait(info: str) -> bool:
    """Whether commands of a session are not answered yet, by what the kernel says of it (Linux:
    drivers/target/iscsi/iscsi_target_configfs.c, lio_target_nacl_info_show). A connection that ends stays listed until
    its commands are answered. What cannot be understood counts as waiting.
    """
    if _CONNECTION not in info:
        return False
    window = _WINDOW.search(info)
    return window is None or int(window[2], 16) < int(window[1], 16)


class Leaving:
    """Has a thread look after images until all have gone who were sent away; there is one only while it is needed.

    ``see_off`` ends the sessions of an image that can be ended, and says whether it left none. It may raise
    DriverError: then it is called again.
    """

    def __init__(self, see_off: Callable[[str], bool], sleep: Callable[[float], object] = time.sleep) -> None:
        self._see_off = see_off
        self._sleep = sleep
        self._guard = threading.Lock()
        self._images: set[str] = set()
        self._watch: Watch | None = None

    def look_after(self, image: str) -> None:
        """Sessions of the image are to end. Returns at once. Raises OSError without a thread."""
        with self._guard:
            self._images.add(image)
            if self._watch is None:
                watch = Watch("leaving children", self._run)
                watch.start()
                self._watch = watch

    def _run(self) -> None:
        pause = FIRST_PAUSE
        while images := self._left():
            self._sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            for image in images:
                self._look(image)

    def _left(self) -> list[str]:
        with self._guard:
            if not self._images:
                self._watch = None
            return sorted(self._images)

    def _look(self, image: str) -> None:
        with self._guard:
            self._images.discard(image)  # before the look: who asks during it is not forgotten
        gone = False
        try:
            gone = self._see_off(image)
        except DriverError as error:
            log.warning("image %s: who may not read any more is still there: %s", image, error)
        finally:
            if not gone:
                with self._guard:
                    self._images.add(image)
