"""This host's parts in transfers by which whole images come to many hosts at once (drivers/transfer).

A part gets ready, waits until Volt says that all begin, and then sends or receives. It is tried once: what does not
come so, the tree brings. Nothing of a part is kept in records: an agent that starts again gets ready under another
``attempt``, and Volt knows by that what it cannot be a part of any more.
"""

from __future__ import annotations

import logging
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from drivers.base import Image, Place, Range, Taken
from drivers.errors import DriverError
from drivers.host.watch import Watch
from drivers.needs import Finding, Machine, check
from drivers.registry import load, names
from drivers.transfer.contract import Content, Terms, Transfer
from drivers.transfer.probe import Probe
from virtman.errors import NotSupported
from volt.client import TransferState, TransferTask, TransferTerms
from volt.spans import united

log = logging.getLogger(__name__)

LAYER = "transfer"
END_WITHIN = 5.0
"""Seconds that an agent which stops gives its parts."""


def found(machine: Machine, address: str) -> dict[str, tuple[Finding, ...]]:
    """The methods of which a driver is installed, and what each needs of this machine."""
    return {name: tuple(check(load(LAYER, name).needs, machine, address)) for name in names(LAYER)}


def usable(machine: Machine, address: str) -> dict[str, type[Transfer]]:
    """The methods that this machine has all for."""
    return {
        name: load(LAYER, name)
        for name, findings in found(machine, address).items()
        if all(finding.met for finding in findings)
    }


class _Counted:
    """A source that counts what a transfer brings."""

    def __init__(self, source: Content) -> None:
        self._source = source
        self.lacking, self.get = source.lacking, source.get
        self.kept = 0

    def put(self, image: Image, ranges: Sequence[Range], file: int) -> Taken:
        taken = self._source.put(image, ranges, file)
        self.kept += taken.kept
        if taken.wrong:
            log.warning("%d ranges that came are not of image %s, and are not kept", len(taken.wrong), image.name)
        return taken


class Part:
    """What this host does in one transfer, in a thread of its own. ``changed`` is called when Volt should hear of it.

    ``missing``: bytes that this host did not have when it got ready. ``over``: nothing more comes, or is sent.
    """

    def __init__(
        self, task: TransferTask, driver: type[Transfer], place: Place, source: Content, image: Image,
        changed: Callable[[], None],
    ) -> None:  # fmt: skip
        self.sends, self.method = task.sends, task.method
        self.attempt = secrets.token_hex(16)
        self.contact, self.error = "", ""
        self.lacks: list[list[int]] = []
        self.missing = 0
        self.over = False
        self._task, self._image, self._changed = task, image, changed
        self._source = _Counted(source)
        self._transfer = driver(place, self._source, image)
        self._probe = Probe(place, self._source, image) if driver.multicasts else None
        self._terms: Terms | None = None
        self._go = threading.Event()
        self._thread = Watch(f"transfer-{task.deployment}", self._run)

    def start(self) -> None:
        """Get ready, in the background. Raises OSError."""
        self._thread.start()

    def begin(self, terms: TransferTerms, limit: int | None) -> None:
        """Send or receive what was agreed on, unless that is of another attempt. Returns at once."""
        if terms.attempt == self.attempt and self._terms is None:
            ranges = [Range(begin, end - begin) for begin, end in terms.ranges]
            self._terms = Terms(terms.number, ranges, terms.sender, terms.receivers, limit, self._task.encrypt)
            self._go.set()

    def end(self) -> Watch:
        """End it in the background, for a method may have much to delete. Returns what ends when nothing of it runs."""
        ending = Watch(f"{self._thread.name}-end", self._stop)
        ending.start()
        return ending

    def _stop(self) -> None:
        self._go.set()
        self._transfer.stop()
        self._thread.join()

    @property
    def begun(self) -> bool:
        return self._terms is not None

    @property
    def kept(self) -> int:
        """Bytes that it has brought so far."""
        return self._source.kept

    @property
    def sent(self) -> int:
        """Bytes that this host has sent to others."""
        return self._transfer.sent_bytes

    @property
    def findings(self) -> dict[str, float | None]:
        """What a try of the network has shown so far."""
        probe = self._probe or self._transfer
        return probe.findings if isinstance(probe, Probe) else {}

    @property
    def state(self) -> TransferState:
        """How far this part is, without what else the host does."""
        if self.over:
            return TransferState.FAILED if self.error else TransferState.WHOLE
        if self.begun:
            return TransferState.FILLING
        return TransferState.READY if self.contact else TransferState.WAITING

    def _run(self) -> None:
        try:
            self._wait_for_all()
            if self._terms is not None:
                act = self._transfer.send if self.sends else self._transfer.receive
                act(self._terms)
        except DriverError as error:
            self._end(" ".join(str(error).split()))
        except Exception as error:  # what comes by the tree waits for this
            log.exception("a transfer of image %s by %s", self._image.name, self.method)
            self._end(repr(error))
        else:
            self._end("")

    def _wait_for_all(self) -> None:
        """Get ready, until all begin. Meanwhile hosts of a multicast find out what it can carry."""
        try:
            self._get_ready()
            self._changed()
            self._go.wait()
        finally:
            if self._probe is not None:
                self._probe.stop()

    def _get_ready(self) -> None:
        if self.sends:
            if self._probe is not None:
                self._probe.offer()
            self.contact = self._transfer.offer()
            return
        lacking = self._source.lacking(self._image)
        self.missing = sum(each.length for each in lacking)
        self.lacks = united([[(each.offset, each.offset + each.length) for each in lacking]])
        if self._probe is not None:
            self._probe.expect()
        self.contact = self._transfer.expect()

    def _end(self, error: str) -> None:
        if error:
            log.warning("deployment %d by %s: %s", self._task.deployment, self.method, error)
        self.error, self.over = error[:1000], True
        self._changed()


class Transfers:
    """The parts of this host in the transfers that Volt has it take part in. ``changed``: see ``Part``."""

    def __init__(
        self, place: Place, source: Content, drivers: Mapping[str, type[Transfer]], changed: Callable[[], None]
    ) -> None:
        self._place, self._source, self._changed = place, source, changed
        self._drivers = drivers
        self._parts: dict[int, Part] = {}

    def clean(self) -> None:
        """Delete what a killed agent has left: nothing of it is of use."""
        shutil.rmtree(self._place.state / LAYER, ignore_errors=True)

    def hear(self, tasks: Iterable[TransferTask]) -> None:
        """End what is not wanted any more, and begin what Volt says. Returns at once."""
        wanted = {task.deployment: task for task in tasks if self.knows(task)}
        for number, part in list(self._parts.items()):
            task = wanted.get(number)
            if task is None or (part.sends, part.method) != (task.sends, task.method):
                part.end()
                del self._parts[number]
            elif task.terms is not None:
                part.begin(task.terms, task.limit)

    def knows(self, task: TransferTask) -> bool:
        """Whether a task is to be done by one of the methods here."""
        return task.method in self._drivers and not task.cancelled

    def part(self, deployment: int) -> Part | None:
        """What this host does in a deployment."""
        return self._parts.get(deployment)

    def take_part(self, task: TransferTask, image: Image) -> None:
        """Get ready for a task, if that is not under way. Raises OSError, NotSupported: it would travel unencrypted."""
        if task.deployment not in self._parts:
            driver = self._drivers[task.method]
            if task.encrypt and not driver.encrypts:
                raise NotSupported(f"the method {task.method} cannot encrypt here, and that was asked for")
            part = Part(task, driver, self._place, self._source, image, self._changed)
            part.start()
            self._parts[task.deployment] = part

    def stop(self) -> None:
        """End all, and wait for that a while: what waits for other hosts ends with the image's stack."""
        by = time.monotonic() + END_WITHIN
        for ending in [part.end() for part in list(self._parts.values())]:  # an answer of Volt may end some meanwhile
            ending.join(max(0.0, by - time.monotonic()))
