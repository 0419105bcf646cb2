"""The reconciler: every image, VM and device of this host becomes what its record says, and what Volt says.

A key names something that is kept in order. Its keeper compares what is wanted with what is there, and names the next
job. The queue asks the keeper whenever something may have changed: Volt's answer, a driver's call, the end of an
operation; and after a failure, when the pause is over (virtman/workqueue.py). That is the only place where something is
tried again, and the queue's ``troubles`` say what is and why.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from drivers.base import CacheGroup
from drivers.digests import digest_of
from drivers.errors import DriverError
from virtman import cleaning, serving
from virtman.deploying import DEPLOYMENT, HYDRATION, DeploymentKeeper
from virtman.devices import Devices
from virtman.errors import StateDamaged, VirtmanError
from virtman.imagekeeper import BOOT_SET, CONTENT, IMAGE, ImageKeeper
from virtman.parallel import raise_all, side_by_side
from virtman.placekeeper import CHILDREN, LOST, PLACE, PlaceKeeper
from virtman.records import ImageRecord
from virtman.stacks import Stacks
from virtman.transferring import Transfers
from virtman.vmkeeper import DEVICE, VM, DeviceKeeper, VmKeeper
from virtman.vms import Vms
from virtman.workqueue import BUSY, Job, Pool, WorkQueue
from volt.client import HeartbeatAnswer, NodeReport

KEPT, ORPHANS, REGISTER, VOLUME = "data without a stack", "stacks without a record", "Volt", "volume "
"""Keys of the host's own; the path of a volume of the cache follows the last one."""

MOST_TOLD = 10000
"""Digests that Volt is told of at most."""


class Upkeep:
    """``group``: the volumes of the cache, if it has any. ``transfers``: see ``DeploymentKeeper``. ``idle_grace``:
    seconds that a stack nobody needs is kept; ``clock`` in seconds, as ``time.monotonic``.
    """

    def __init__(
        self, stacks: Stacks, vms: Vms, group: CacheGroup | None, devices: Devices, transfers: Transfers,
        idle_grace: float, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._stacks, self._group = stacks, group
        self.queue = WorkQueue(self._plan, clock)
        self.images = ImageKeeper(stacks, self.queue, partial(self._ask, KEPT, "check"), idle_grace, clock)
        self.deployments = DeploymentKeeper(stacks, self.queue, transfers)
        self.places = PlaceKeeper(stacks, self.queue)
        self.vms = VmKeeper(vms, stacks, self.queue)
        self.devices = DeviceKeeper(devices, self.queue)
        self.kept: tuple[str, ...] = ()
        """Digests of what this host keeps without a stack, as of the last check."""
        self._discard: frozenset[str] = frozenset()
        """Digests of what is kept and was withdrawn, as Volt said last."""
        self._silent = False
        """Volt did not answer the last heartbeat."""
        self.stopped = False
        """The agent ends."""
        self._plans: dict[str, Callable[[str], Job | None]] = {
            IMAGE: partial(self._plan_image, self.images.plan, self.images.forget),
            CONTENT: partial(self._plan_image, self.images.plan_content, lambda _name: None),
            HYDRATION: partial(self._plan_image, self.deployments.plan_hydration, lambda _name: None),
            BOOT_SET: partial(self._plan_image, self.images.plan_boot_set, lambda _name: None),
            PLACE: partial(self._plan_image, self.places.plan, self.places.plan_without_stack),
            LOST: partial(self._plan_image, self.places.plan_lost, self.places.forget_lost),
            CHILDREN: self.places.plan_children,
            DEPLOYMENT: self.deployments.plan,
            VM: self.vms.plan,
            DEVICE: self.devices.plan,
            VOLUME: lambda path: self._plan_own(VOLUME + path, "tend", partial(self._tend_volume, Path(path))),
            REGISTER: lambda _: self._plan_own(REGISTER, "register", stacks.volt.register, Pool.VOLT),
            ORPHANS: lambda _: self._plan_own(ORPHANS, "remove", self._remove_orphans),
            KEPT: lambda _: self._plan_own(KEPT, "check", self._tend_kept),
        }

    def start(self) -> None:
        """Have everything compared with its record, in the background."""
        self._take_over()
        self.queue.start()
        for key in (*self.devices.keys(), *self.vms.keys(), *self.images.keys(), *self.places.keys()):
            self.queue.wake(key, now=True)
        self._ask(REGISTER, "register")
        self._ask(KEPT, "check")

    def repair(self) -> Mapping[str, list[str]]:
        """Have everything compared with its record now, and wait until what can be done is done.

        Returns the names of the VMs, images, devices and orphans that something was done for. Raises VirtmanError
        with every error, but for those of images in place, which a repair cannot end. It does not wait for Volt.
        """
        before = self._needy()
        self._take_over()
        keys = [*self.devices.keys(), *self.vms.keys(), *self.images.keys(), ORPHANS]
        places = self.places.keys()
        for key in places:
            self.queue.wake(key, now=True)
        self.queue.settle(keys)
        # The job of one key may have held what another one needs: a VM's further disk, say.
        self.queue.settle(set(keys) - self.queue.troubles().keys())
        in_place = {IMAGE + record.name for record in self._stacks.records.all() if record.in_place is not None}
        failed = [why for key, why in self.queue.troubles().items() if key in set(keys) - in_place]
        if failed:
            raise VirtmanError("; ".join(failed))
        after = self._needy()
        return {kind: sorted(names - after[kind]) for kind, names in before.items()}

    def _take_over(self) -> None:
        self.images.take_over()
        self.vms.open_all()
        self._ask(ORPHANS, "remove")

    def _needy(self) -> dict[str, set[str]]:
        return {
            "vms": self.vms.needy(),
            "images": self.images.needy(),
            "orphans": set(self._stacks.orphans()),
            "devices": self.devices.needy(),
        }

    def repairing(self) -> bool:
        """Whether a start, or ``repair``, is still under way."""
        return self.images.taking_over() or self.vms.opening()

    # What happens

    def handle(self, answer: HeartbeatAnswer | None) -> None:
        """Have done what Volt's answer, or its silence, asks for. Returns at once."""
        if answer is not None:
            self.deployments.hear(answer.transfers)  # also of a suspended host, which says so
        if self.stopped or self._stacks.suspended:
            return
        back, self._silent = self._silent and answer is not None, answer is None
        if answer is not None:
            self.places.hear(answer.assignments, answer.absent)
            self.images.withdraw(answer.withdrawn)
            self._discard = frozenset(answer.discard)
            if self._discard:
                self._ask(KEPT, "check")
        self.tend_all()
        if back:
            for key in self.queue.troubles():
                self.queue.wake(key, now=True)

    def tend_all(self) -> None:
        """Plan for images that are due, VMs with something unfinished, devices, and the cache's volumes."""
        self.images.tend()
        self.vms.tend()
        self.devices.tend()
        with contextlib.suppress(DriverError):  # status fails with it
            for volume in self._group.volumes() if self._group is not None else []:
                self._ask(f"{VOLUME}{volume.path}", "tend")

    def tend_volume(self, path: Path) -> None:
        """Have a volume of the cache tended now, after no pause. Returns at once."""
        self._ask(f"{VOLUME}{path}", "tend", now=True)

    def trouble(self, key: str) -> str:
        """Why the last job of a key failed that is yet to be done; nothing if none did."""
        return self.queue.troubles().get(key, "")

    def released(self, image: str) -> None:
        """An operation on an image has ended, or a VM of it is gone. Returns at once."""
        self.images.released(image)
        self.places.released(image)
        self.vms.released(image)

    def _ask(self, key: str, what: str, *, now: bool = False) -> None:
        self.queue.wake(key, now=now, ask=what)

    # What is told

    def news(self) -> tuple[list[NodeReport], list[str]]:
        """What Volt is told of this host's images, and the images in no report that may be needed.

        Records of those cannot be read, or their stacks are not made. Touches nothing that could be slow.
        """
        records, unreadable = self._stacks.records.sorted_out()
        reports = [self.images.report(record) for record in records if record.steady]
        return reports, sorted([*unreadable, *(record.name for record in records if not record.steady)])

    # What is to be done

    def _plan(self, key: str) -> Job | None:
        if self.stopped or self._stacks.suspended:
            return None
        kind = next((kind for kind in self._plans if key.startswith(kind)), None)
        try:
            return None if kind is None else self._plans[kind](key.removeprefix(kind))
        except StateDamaged:
            return None  # status tells of it

    def _plan_image(
        self, plan: Callable[[ImageRecord], Job | None], without: Callable[[str], Job | None], name: str
    ) -> Job | None:
        if self._stacks.locks.taken(name):
            return BUSY
        record = self._stacks.records.get(name)
        return without(name) if record is None else plan(record)

    def _plan_own(self, key: str, what: str, act: Callable[[], object], pool: Pool = Pool.LONG) -> Job | None:
        return Job(what, act, pool, on_demand=True) if self.queue.asked(key, what) else None

    def _tend_kept(self) -> None:
        discard, self._discard = self._discard, frozenset()  # Volt says it again of what cannot be deleted
        try:
            cleaning.discard(self._stacks, discard)
        finally:
            unused = cleaning.unreferenced(self._stacks, self._stacks.records.all(), cleaning.kept_keys(self._stacks))
            self.kept = tuple(digest_of(key) for key in sorted(unused)[:MOST_TOLD])

    def _tend_volume(self, path: Path) -> None:
        if self._group is not None:
            self._group.tend_volume(path)

    def _remove_orphans(self) -> None:
        stacks = [partial(serving.remove_orphan, self._stacks, name) for name in sorted(self._stacks.orphans())]
        raise_all(side_by_side([*stacks, *self.devices.removals()]))
