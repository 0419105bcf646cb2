"""What the agent does unasked: have every image and VM of this host be as its record says, and as Volt says.

All of it is one function, which compares what is wanted of an image or a VM with what is there, and names the next
thing to do (``_plan``). It is asked again whenever something may have changed: Volt's answer, a driver's call, the end
of an operation; and after a failure, when its pause is over (virtman/workqueue.py).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

from drivers.base import CacheStats, Image, Parent, PathState, PathStatus, Volume
from drivers.errors import DriverError, NotAttached
from virtman import disks
from virtman.devices import Devices
from virtman.errors import ContentChanged, StateDamaged
from virtman.hostdrivers import HostDrivers
from virtman.kept import Kept
from virtman.records import ImageRecord, Role
from virtman.stacks import Stacks
from virtman.vms import Vms
from virtman.workqueue import Job, Pool, WorkQueue
from volt.client import Assignment, HeartbeatAnswer, NodeReport

log = logging.getLogger(__name__)

NOTHING = CacheStats(0, 0)

USED_LOOK, IDLE_LOOK = 4.0, 30.0
"""Seconds at least between looks, which come with a heartbeat, at an image that VMs or children of this host use, and
at one that nobody uses: whether it is served, and at its cache. What is served in place is looked at with each.
Drivers tell at once of processes that end (drivers/base.py, Died)."""

IMAGE, PLACE, LOST, CHILDREN, VM, DEVICE = "image ", "place of ", "lost parents of ", "children of ", "vm ", "device "
CONTENT = "content of "
VOLUMES, KEPT = "volumes of the cache", "data without a stack"
"""Keys of the queue: all but the last two are followed by a name. What a host has and what Volt says of it are two:
while Volt is away, or says what cannot be followed, a process that died is started again at once. So are a place and
the parents that were lost: neither waits for the other, which may never succeed."""


class Upkeep:
    """``idle_grace``: seconds that a stack nobody needs is kept; ``clock`` in seconds, as ``time.monotonic``."""

    def __init__(
        self,
        stacks: Stacks,
        vms: Vms,
        drivers: HostDrivers,
        kept: Kept,
        devices: Devices,
        idle_grace: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stacks = stacks
        self._vms = vms
        self._drivers = drivers
        self._kept = kept
        self._devices = devices
        self._devices_due: set[str] = set()
        """Names of attachments that were not looked at since the last heartbeat."""
        self._idle_grace = idle_grace
        self._clock = clock
        self._idle_since: dict[str, float] = {}
        self._look_again: dict[str, float] = {}
        """When to look at images next."""
        self._stats: dict[str, CacheStats] = {}
        self._heard_lock = threading.Lock()
        self._heard: dict[str, Assignment] = {}
        """By image, what Volt said last, until it is followed; the same for who may read."""
        self._children: dict[str, Assignment] = {}
        self._absent: set[str] = set()
        """Images in whose tree this host has no place, as Volt said last."""
        self._withdrawn: set[str] = set()
        """Images that are to go as soon as nobody needs them, as Volt said last."""
        self._discard: set[str] = set()
        """Digests of what is kept and was withdrawn, as Volt said last."""
        self._kept_due = True
        """What is kept is to be looked at."""
        self._lost: dict[str, set[str]] = {}
        """By image, parents that a driver lost, until Volt is told."""
        self._untended: set[str] = set()
        """Images that were not looked at since the last heartbeat."""
        self._used: set[str] = set()
        """Images that VMs needed, or may have needed, at the last heartbeat: not asked for each image, which would read
        all records of VMs each time."""
        self._idle_long: set[str] = set()
        """Images that nobody needed for so long that their stacks may go."""
        self._once: dict[str, Job] = {}
        self._silent = False
        """Volt did not answer the last heartbeat."""
        self.volumes: list[Volume] = []
        """The volumes of the cache when they were looked at last; none if the driver has none."""
        self._volumes_due = False
        self.stopped = False
        """The agent ends."""
        self.queue = WorkQueue(self._plan, clock)

    def once(self, key: str, job: Job) -> None:
        """Do something until it succeeds once."""
        with self._heard_lock:
            self._once[key] = job
        self.queue.wake(key, now=True)

    def handle(self, answer: HeartbeatAnswer | None) -> None:
        """Have done what Volt's answer, or its silence, asks for. Returns at once."""
        if self.stopped or self._stacks.suspended:
            return
        back, self._silent = self._silent and answer is not None, answer is None
        if answer is not None:
            self._hear(answer)
        self.tend_all()
        if back:
            for key in self.queue.troubles():
                self.queue.wake(key, now=True)

    def _hear(self, answer: HeartbeatAnswer) -> None:
        with self._heard_lock:
            self._absent = set(answer.absent)
            self._withdrawn, self._discard = set(answer.withdrawn), set(answer.discard)
        self._hear_of_places(answer.assignments)
        for image in answer.absent:
            self.queue.wake(PLACE + image)
        for image in answer.withdrawn:
            self.queue.wake(IMAGE + image)

    def _hear_of_places(self, assignments: Collection[Assignment]) -> None:
        with self._heard_lock:
            known = {name: assignment.revision for name, assignment in self._heard.items()}
            news = [a for a in assignments if known.get(a.image, a.revision) <= a.revision]
            self._heard |= {assignment.image: assignment for assignment in news}
            self._children |= {assignment.image: assignment for assignment in news}
        for assignment in news:
            self.queue.wake(CHILDREN + assignment.image)
            self.queue.wake(PLACE + assignment.image, now=known.get(assignment.image) != assignment.revision)

    def tend_all(self) -> None:
        """Have the images that are due, VMs with something unfinished, and the cache's volumes looked after."""
        records, now = self._stacks.records(), self._clock()
        vms, unreadable = self._vms.shelf.sorted_out()
        before, self._used = self._used, {each.name for each in records} if unreadable else {vm.image for vm in vms}
        due = {record.name for record in records if now >= self._look_again.get(record.name, now)}
        due |= {record.name for record in records} & (before ^ self._used)
        with self._heard_lock:
            self._untended |= due
            self._volumes_due = True
        for record in records:
            if record.name in due or not record.steady:
                self.queue.wake(IMAGE + record.name, now=record.name in self._stacks.flaws)  # it may be back
                if self._stacks.wants_digest(record):
                    self.queue.wake(CONTENT + record.name)
                if self._place_is_open(record):
                    self.queue.wake(PLACE + record.name)
        for vm in vms:
            if vm.operation is not None or vm.leftover:
                self.queue.wake(VM + vm.name)
        for device in self._devices.records():
            with self._heard_lock:
                self._devices_due.add(device.name)
            self.queue.wake(DEVICE + device.name)
        self.queue.wake(VOLUMES)
        self.queue.wake(KEPT)

    def _place_is_open(self, record: ImageRecord) -> bool:
        """Whether something may have to be done about an image's place in the tree: mostly nothing has."""
        return record.leaving or record.given_up or record.name in self._absent or record.name in self._heard

    def parent_lost(self, image: Image, parent: Parent) -> None:
        """A driver lost a parent: have Volt told. Returns at once."""
        with self._heard_lock:
            self._lost.setdefault(image.name, set()).add(parent.host)
        self.queue.wake(LOST + image.name, now=True)

    def died(self, image: str) -> None:
        """The process that serves an image died: have it started again. Returns at once."""
        self.queue.stumbled(IMAGE + image, "the process that serves it died")

    def released(self, image: str) -> None:
        """An operation on an image has ended, or a VM of it is gone. Returns at once."""
        with self._heard_lock:
            self._untended.add(image)
        for kind in (IMAGE, PLACE, CONTENT):
            self.queue.wake(kind + image)
        if image in self._lost:
            self.queue.wake(LOST + image)

    def news(self) -> tuple[list[NodeReport], list[str]]:
        """What Volt is told of this host's images, and the images in no report that may be needed.

        Records of those cannot be read, or their stacks are not made. Touches nothing that could be slow.
        """
        records, unreadable = self._stacks.sorted_out()
        reports = [self._report_of(record) for record in records if record.steady]
        return reports, sorted([*unreadable, *(record.name for record in records if not record.steady)])

    def _report_of(self, record: ImageRecord) -> NodeReport:
        return NodeReport(
            image=record.name,
            revision=record.revision,
            fetched_bytes=self.stats(record.name).held_bytes,
            parent=self.parent_in_use(record),
        )

    def kept(self) -> tuple[str, ...]:
        """Digests of what this host keeps without a stack, as of the last look."""
        return self._kept.digests

    def parent_in_use(self, record: ImageRecord) -> str | None:
        """The host that misses are read from now."""
        return next((path.parent.host for path in self.paths(record) if path.state is PathState.ACTIVE), None)

    def paths(self, record: ImageRecord) -> list[PathStatus]:
        """The routes to the image's parents; none for an origin, and for a stack that is yet to be restored."""
        if record.role is Role.ORIGIN:
            return []
        try:
            return self._drivers.attach.paths(record.name)
        except NotAttached:
            return []

    def stats(self, image: str) -> CacheStats:
        """What the image's cache held when it was looked at last."""
        return self._stats.get(image, NOTHING)

    def refresh(self, record: ImageRecord) -> CacheStats:
        """Look at the image's cache now; what was seen last counts while its daemon is being started again."""
        if record.role is Role.HOST and record.steady:
            try:
                self._stats[record.name] = self._drivers.cache.stats(record.image)
            except (DriverError, OSError) as error:  # the kernel may be taking it away, or its disk may be dying
                log.info("image %s: its cache cannot be looked at now: %s", record.name, error)
        return self.stats(record.name)

    def look_at_volumes(self) -> list[Volume]:
        """Look at the volumes of the cache now. Raises DriverError."""
        self._volumes_due = False
        if (group := self._drivers.cache_group) is not None:
            self.volumes = group.volumes()
        return self.volumes

    def troubles(self) -> dict[str, str]:
        """What this host tried in vain, by what it is about; all of it is tried again."""
        return self.queue.troubles()

    # What is to be done

    def _plan(self, key: str) -> Job | None:
        if self.stopped or self._stacks.suspended:
            return None
        if key in self._once:
            return self._plan_once(key)
        if key == VOLUMES:
            return Job("look", self.look_at_volumes, Pool.LONG, on_demand=True) if self._volumes_due else None
        if key == KEPT:
            return self._plan_kept()
        plans = {
            IMAGE: lambda name: self._plan_image(name, self._plan_stack, self._forget_image),
            PLACE: lambda name: self._plan_image(name, self._plan_place, self._plan_no_place),
            LOST: lambda name: self._plan_image(name, self._plan_lost, self._forget_lost),
            CONTENT: lambda name: self._plan_image(name, self._plan_content, self._forget_content),
            CHILDREN: self._plan_children,
            VM: self._plan_vm,
            DEVICE: self._plan_device,
        }
        kind = next((kind for kind in plans if key.startswith(kind)), None)
        return None if kind is None else plans[kind](key.removeprefix(kind))

    def _plan_once(self, key: str) -> Job:
        job = self._once[key]

        def act() -> None:
            job.act()
            with self._heard_lock:
                if self._once.get(key) is job:
                    del self._once[key]

        return replace(job, act=act)

    def _plan_kept(self) -> Job | None:
        if self._discard:
            return Job("delete what was withdrawn", self._discard_kept, Pool.LONG, on_demand=True)
        return Job("look", self._look_at_kept, Pool.LONG, on_demand=True) if self._kept_due else None

    def _discard_kept(self) -> None:
        with self._heard_lock:
            discard, self._discard = self._discard, set()  # Volt says it again of what could not be deleted
        self._kept.discard(discard)

    def _look_at_kept(self) -> None:
        self._kept_due = False
        self._kept.look()

    def _plan_children(self, image: str) -> Job | None:
        if image not in self._children:
            return None
        return Job("let children in", partial(self._admit, image), Pool.CHILDREN, on_demand=True)

    def _admit(self, image: str) -> None:
        with self._heard_lock:
            assignment = self._children.pop(image)
        try:
            with contextlib.suppress(StateDamaged):  # status tells of it
                self._stacks.admit(assignment)
        except BaseException:
            with self._heard_lock:
                self._children.setdefault(image, assignment)  # to be tried again, if nothing newer came
            raise

    def _plan_vm(self, name: str) -> Job | None:
        """An operation that nobody carries out now is one that was cut off."""
        if self._vms.locks.taken(name):
            return None
        try:
            record = self._vms.shelf.get(name)
        except StateDamaged:
            return None  # status tells of it
        if record is None or (record.operation is None and not disks.leftovers(self._vms, record)):
            return None
        return Job("repair", partial(disks.repair, self._vms, name), Pool.LONG)

    def _plan_device(self, name: str) -> Job | None:
        """A device that is read through the cache: what was cut off ends, and it is looked at with each heartbeat."""
        try:
            record = self._devices.find(name)
        except StateDamaged:
            return None  # status tells of it
        if record is None or self._devices.locks.taken(record.number):
            return None
        if record.operation is not None:
            return Job("repair", partial(self._devices.repair_if_free, name), Pool.LONG)
        if name in self._devices_due:
            return Job("look", partial(self._tend_device, name), Pool.LONG, on_demand=True)
        return None

    def _tend_device(self, name: str) -> None:
        with self._heard_lock:
            self._devices_due.discard(name)
        self._devices.tend(name)

    def _plan_image(
        self,
        name: str,
        with_record: Callable[[ImageRecord], Job | None],
        without: Callable[[str], Job | None],
    ) -> Job | None:
        if self._stacks.busy(name):
            return None  # whoever is busy with it wakes its keys at the end
        try:
            record = self._stacks.find(name)
        except StateDamaged:
            return None  # status tells of it
        if record is None:
            return without(name)
        return with_record(record)

    def _plan_stack(self, record: ImageRecord) -> Job | None:
        """What the host has of an image is not what its record says."""
        name = record.name
        if record.leaving:
            return None
        if record.operation is not None:
            return Job("repair", partial(self._stacks.restore, name), Pool.VOLT)
        if not self._stacks.serving(name):
            return Job("serve", partial(self._stacks.restore, name), _pool_of(record))
        return self._plan_whole(record)

    def _plan_whole(self, record: ImageRecord) -> Job | None:
        """A stack with nothing amiss: may it go, and is it to be looked at?"""
        name = record.name
        if name in self._withdrawn and not self._stacks.needed(record):
            return Job("let go of what is withdrawn", partial(self._let_go_withdrawn, name), Pool.VOLT)
        if name in self._untended:
            return Job("tend", partial(self._tend, name), _pool_of(record), on_demand=True)
        if name in self._idle_long:
            return Job("let go", partial(self._let_go, name), Pool.VOLT)
        return None

    def _plan_content(self, record: ImageRecord) -> Job | None:
        """The digest of what is served in place is asked for."""
        if not self._stacks.wants_digest(record):
            return None
        return Job("compute the digest", partial(self._stacks.compute_digest, record.name), Pool.SLOW)

    def _forget_content(self, _name: str) -> None:
        """Nothing is served."""

    def _forget_image(self, name: str) -> None:
        for kept in (self._idle_since, self._look_again, self._stats):
            kept.pop(name, None)
        self._untended.discard(name)
        self._idle_long.discard(name)
        self._kept_due = True
        self.queue.wake(KEPT)

    def _plan_place(self, record: ImageRecord) -> Job | None:
        """Volt, or a driver, says something else of the stack's place in the tree than its record."""
        name = record.name
        if record.leaving:
            return Job("leave Volt's tree", partial(self._stacks.leave_later, name), Pool.VOLT)
        if not record.steady:
            return None
        if self._stacks.unwanted(record):  # the end of a VM wakes this key
            return Job("drop what was unpublished", partial(self._stacks.drop_origin, name), Pool.LONG)
        if name in self._absent:
            return None if record.given_up else Job("join again", partial(self._rejoin, name), Pool.VOLT)
        return self._plan_following(record)

    def _plan_lost(self, record: ImageRecord) -> Job | None:
        if record.leaving:
            self._forget_lost(record.name)
        if not record.steady or not self._lost.get(record.name):
            return None
        return Job("report", partial(self._report, record.name), Pool.VOLT)

    def _forget_lost(self, name: str) -> None:
        """The stack is gone: a later one may read from the same parent, alive again."""
        with self._heard_lock:
            self._lost.pop(name, None)

    def _plan_following(self, record: ImageRecord) -> Job | None:
        heard = self._heard.get(record.name)
        if heard is not None and heard.revision > record.revision and record.name in self._stacks.flaws:
            return None  # who does not serve says nothing by which others would read from here again
        if heard is not None and heard.revision > record.revision:
            return Job("follow", partial(self._follow, heard), Pool.LONG, on_demand=True)
        if heard is not None:
            self._forget(heard)
        return None

    def _plan_no_place(self, name: str) -> Job | None:
        """There is no stack."""
        heard = self._heard.get(name)
        if heard is None:
            return None
        return Job("give up a place without a stack", partial(self._leave_unknown, heard), Pool.VOLT)

    def _leave_unknown(self, assignment: Assignment) -> None:
        self._stacks.leave_unknown(assignment.image)
        self._forget(assignment)

    def _report(self, name: str) -> None:
        hosts = self._lost.get(name, set())
        for host in sorted(hosts):
            with self._heard_lock:
                hosts.discard(host)
            try:
                assignment = self._stacks.parent_lost(name, host)
            except BaseException:
                with self._heard_lock:
                    hosts.add(host)  # to be tried again
                raise
            if assignment is not None:  # followed by itself: Volt is told once, however often that fails
                self._hear_of_places([assignment])

    def _rejoin(self, name: str) -> None:
        self._stacks.rejoin(name)
        with self._heard_lock:
            self._absent.discard(name)

    def _follow(self, assignment: Assignment) -> None:
        try:
            self._stacks.follow(assignment)
        except ContentChanged:
            self._forget(assignment)  # this host has left, so it says nothing any more
            raise
        self._forget(assignment)

    def _forget(self, assignment: Assignment) -> None:
        with self._heard_lock:
            if self._heard.get(assignment.image) is assignment:
                del self._heard[assignment.image]

    def _tend(self, name: str) -> None:
        with self._heard_lock:
            self._untended.discard(name)
        record = self._stacks.find(name)
        if record is not None and record.steady:
            if record.in_place is not None:
                self._stacks.look(record)
            self.refresh(record)
            self._note_idle(record)
            self._stacks.settle_parents(record)

    def _note_idle(self, record: ImageRecord) -> None:
        now = self._clock()
        if record.name in self._used or not self._stacks.idle(record):  # if not any more, the next heartbeat sees it
            self._idle_since.pop(record.name, None)
            self._look_again[record.name] = now + self._until_next_look(record)
            return
        left = self._idle_since.setdefault(record.name, now) + self._idle_grace - now
        self._look_again[record.name] = now + (min(IDLE_LOOK, left) if left > 0 else IDLE_LOOK)
        if left <= 0:
            self._idle_long.add(record.name)

    def _until_next_look(self, record: ImageRecord) -> float:
        """Seconds for which an image that has to stay is not looked at again."""
        if record.in_place is not None:
            return 0.0
        return USED_LOOK if record.children or record.name in self._used else IDLE_LOOK

    def _let_go_withdrawn(self, name: str) -> None:
        with self._heard_lock:
            self._withdrawn.discard(name)  # Volt says it again of what is still here
        if self._stacks.let_go(name):
            log.info("image %s: it is withdrawn, and nobody needs it", name)

    def _let_go(self, name: str) -> None:
        self._idle_long.discard(name)
        if self._stacks.remove_if_idle(name):
            log.info("image %s: nobody needed it for %.0f s; its cache is kept", name, self._idle_grace)
            self._idle_since.pop(name, None)


def _pool_of(record: ImageRecord) -> Pool:
    """Whose threads look at an image: one in place may lie on storage that does not answer."""
    return Pool.LONG if record.in_place is None else Pool.PLACE
