"""The reconciler: every image, VM and device of this host becomes what its record says, and what Volt says.

A key names something that is kept in order; its keeper compares what is wanted with what is there, and names the next
job. It is asked whenever something may have changed: Volt's answer, a driver's call, the end of an operation; and after
a failure, when its pause is over (virtman/workqueue.py). That is the only place where something is tried again, and
``troubles`` says what is and why.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from drivers.errors import DriverError
from virtman.devices import Devices
from virtman.errors import RepairIncomplete, StateDamaged
from virtman.hostdrivers import HostDrivers
from virtman.imagekeeper import CONTENT, IMAGE, ImageKeeper
from virtman.looks import Looks
from virtman.parallel import raise_all, side_by_side
from virtman.placekeeper import CHILDREN, LOST, PLACE, PlaceKeeper
from virtman.records import ImageRecord
from virtman.retained import Retained
from virtman.stacks import Stacks
from virtman.vmkeeper import DEVICE, VM, DeviceKeeper, VmKeeper
from virtman.vms import Vms
from virtman.workqueue import Job, Pool, WorkQueue
from volt.client import HeartbeatAnswer, NodeReport

KEPT, STRAYS, REGISTER, VOLUME = "data without a stack", "stacks without a record", "Volt", "volume "
"""Keys of the host's own; the path of a volume of the cache follows the last one."""


class Upkeep:
    """``idle_grace``: seconds that a stack nobody needs is kept; ``clock`` in seconds, as ``time.monotonic``.

    ``register`` tells Volt of this host.
    """

    def __init__(
        self,
        stacks: Stacks,
        vms: Vms,
        drivers: HostDrivers,
        retained: Retained,
        devices: Devices,
        register: Callable[[], object],
        idle_grace: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stacks, self._drivers, self._retained = stacks, drivers, retained
        self.queue = WorkQueue(self._plan, clock)
        self.looks = Looks(drivers.source)
        self.images = ImageKeeper(stacks, vms, self.looks, self.queue, partial(self._want, KEPT), idle_grace, clock)
        self.places = PlaceKeeper(stacks, self.queue)
        self.vms = VmKeeper(vms, stacks, self.queue)
        self.devices = DeviceKeeper(devices, self.queue)
        self._lock = threading.Lock()
        self._own = {
            REGISTER: Job("register", register, Pool.VOLT),
            STRAYS: Job("remove", self._remove_strays, Pool.LONG),
            KEPT: Job("look", self._tend_kept, Pool.LONG, on_demand=True),
        }
        self._due = {REGISTER, KEPT}
        """Which of these jobs are to be done, until they succeed."""
        self._discard: frozenset[str] = frozenset()
        """Digests of what is kept and was withdrawn, as Volt said last."""
        self._silent = False
        """Volt did not answer the last heartbeat."""
        self.stopped = False
        """The agent ends."""

    def start(self) -> None:
        """Have everything compared with its record, in the background."""
        self._take_over()
        self.queue.start()
        for key in (*self._keys(), REGISTER, KEPT):
            self.queue.wake(key, now=True)

    def repair(self) -> Mapping[str, list[str]]:
        """Have everything compared with its record now, and wait until what can be done is done.

        Returns the names of the VMs, images, devices and strays that something was done for. Raises RepairIncomplete
        with every error.
        """
        before = self._needy()
        self._take_over()
        keys = self._keys()
        self.queue.settle([*keys, *self.places.keys()])
        # What is wrong with what is served in place, or at Volt, cannot be repaired here.
        excused = {IMAGE + name for name in self._stacks.flaws}
        failed = [why for key, why in self.queue.troubles().items() if key in set(keys) - excused]
        if failed:
            raise RepairIncomplete("; ".join(failed))
        after = self._needy()
        return {kind: sorted(names - after[kind]) for kind, names in before.items()}

    def _take_over(self) -> None:
        self.images.restore_all()
        self.vms.open_all()
        self._want(STRAYS)

    def _keys(self) -> list[str]:
        return [*self.devices.keys(), *self.vms.keys(), *self.images.keys(), STRAYS]

    def _needy(self) -> dict[str, set[str]]:
        return {
            "vms": self.vms.needy(),
            "images": self.images.needy(),
            "strays": set(self._stacks.strays()),
            "devices": self.devices.needy(),
        }

    def repairing(self) -> bool:
        """Whether a start, or ``repair``, is still under way."""
        return self.images.restoring() or self.vms.opening()

    # What happens

    def handle(self, answer: HeartbeatAnswer | None) -> None:
        """Have done what Volt's answer, or its silence, asks for. Returns at once."""
        if self.stopped or self._stacks.suspended:
            return
        back, self._silent = self._silent and answer is not None, answer is None
        if answer is not None:
            self.places.hear(answer.assignments, answer.absent)
            self.images.withdraw(answer.withdrawn)
            self._discard = frozenset(answer.discard)
            if self._discard:
                self._want(KEPT)
        self.tend_all()
        if back:
            for key in self.queue.troubles():
                self.queue.wake(key, now=True)

    def tend_all(self) -> None:
        """Have the images that are due, VMs with something unfinished, devices, and the cache's volumes looked at."""
        self.images.tend()
        self.places.tend()
        self.vms.tend()
        self.devices.tend()
        with contextlib.suppress(DriverError):  # status fails with it
            for volume in self._drivers.volumes():
                self._want(f"{VOLUME}{volume.path}")

    def tend_volume(self, path: Path) -> None:
        """Have a volume of the cache looked at now, and no pause go on. Returns at once."""
        self._want(f"{VOLUME}{path}", now=True)

    def released(self, image: str) -> None:
        """An operation on an image has ended, or a VM of it is gone. Returns at once."""
        self.images.released(image)
        self.places.released(image)
        self.vms.released(image)

    def _want(self, key: str, *, now: bool = False) -> None:
        with self._lock:
            self._due.add(key)
        self.queue.wake(key, now=now)

    # What is told

    def news(self) -> tuple[list[NodeReport], list[str]]:
        """What Volt is told of this host's images, and the images in no report that may be needed.

        Records of those cannot be read, or their stacks are not made. Touches nothing that could be slow.
        """
        records, unreadable = self._stacks.sorted_out()
        reports = [self.looks.report(record) for record in records if record.steady]
        return reports, sorted([*unreadable, *(record.name for record in records if not record.steady)])

    def kept(self) -> tuple[str, ...]:
        """Digests of what this host keeps without a stack, as of the last look."""
        return self._retained.digests

    def troubles(self) -> dict[str, str]:
        """What failed on this host, by what it is about; all of it is tried again."""
        return self.queue.troubles()

    # What is to be done

    def _plan(self, key: str) -> Job | None:
        if self.stopped or self._stacks.suspended:
            return None
        if (job := self._own_job(key)) is not None:
            return replace(job, act=partial(self._do_own, key, job)) if key in self._due else None
        plans: dict[str, Callable[[str], Job | None]] = {
            IMAGE: partial(self._plan_image, self.images.plan, self.images.forget),
            CONTENT: partial(self._plan_image, self.images.plan_content, lambda _name: None),
            PLACE: partial(self._plan_image, self.places.plan, self.places.plan_without_stack),
            LOST: partial(self._plan_image, self.places.plan_lost, self.places.forget_lost),
            CHILDREN: self.places.plan_children,
            VM: self.vms.plan,
            DEVICE: self.devices.plan,
        }
        kind = next((kind for kind in plans if key.startswith(kind)), None)
        return None if kind is None else plans[kind](key.removeprefix(kind))

    def _plan_image(
        self, plan: Callable[[ImageRecord], Job | None], without: Callable[[str], Job | None], name: str
    ) -> Job | None:
        if self._stacks.busy(name):
            return None  # whoever is busy with it wakes its keys at the end
        try:
            record = self._stacks.find(name)
        except StateDamaged:
            return None  # status tells of it
        return without(name) if record is None else plan(record)

    def _own_job(self, key: str) -> Job | None:
        if key.startswith(VOLUME):
            return Job("tend", partial(self._tend_volume, Path(key.removeprefix(VOLUME))), Pool.LONG, on_demand=True)
        return self._own.get(key)

    def _do_own(self, key: str, job: Job) -> None:
        with self._lock:
            self._due.discard(key)
        try:
            job.act()
        except BaseException:
            with self._lock:
                self._due.add(key)
            raise

    def _tend_kept(self) -> None:
        with self._lock:
            discard, self._discard = self._discard, frozenset()  # Volt says it again of what cannot be deleted
        self._retained.discard(discard)

    def _tend_volume(self, path: Path) -> None:
        if (group := self._drivers.cache_group) is not None:
            group.tend_volume(path)

    def _remove_strays(self) -> None:
        stacks = [partial(self._stacks.remove_stray, name) for name in sorted(self._stacks.strays())]
        raise_all(side_by_side([*stacks, *self.devices.removals()]))
