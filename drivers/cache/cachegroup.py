"""The cache group of a host: volumes, and what is read through them.

A *member* is a bcache backing device, named by its map: an image's, which is read-only and may join and leave a volume
while it is read; or that of a device which a VM writes to. That one joins before anybody uses it, and once: a read that
misses just when it joins could be kept although a write has overtaken it, since what is on its way by then is not
tracked (Linux: drivers/md/bcache/request.c, detached_dev_do_request). It may leave at any time.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

from drivers.base import Volume, VolumeState
from drivers.cache.cachevolumes import Volumes, size_of
from drivers.cache.rests import Rests, growing
from drivers.errors import BadVolume, DriverError, VolumeInUse
from drivers.host.space import Room
from drivers.kernel import bcachedev, devmapper

log = logging.getLogger(__name__)

RETRY, PATIENCE = 30.0, 20
"""Seconds at least between two tries to start a volume unasked, or to empty it. One that was slow and in vain is tried
again, also for an image that is opened, after so many times as long: everybody else waits meanwhile."""

LONGEST = 3600.0
"""Seconds at most between two tries to empty a volume that fail quickly; each is twice as long as the one before."""

_FULL = "it takes no more members"
_STOP = "it could not be stopped: {}; this is tried again, and once it is added again"
_REMOVAL = (
    "it could not be removed: {}; this is tried again, also by the next virtman cache remove; no image joins it unless"
    " it is added again"
)

IMAGE, DEVICE = "virtman-cacheof-", "virtman-volumeof-"
"""How the maps of members are called: of an image, and of a device."""


class Group:
    """``lock`` is held by whoever makes or removes members, and here: nobody stops a volume while somebody joins it."""

    def __init__(
        self, folder: Path, *, file_size: int, bucket: int, room: Room | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """``clock`` in seconds."""
        self._clock = clock
        self.volumes = Volumes(folder, file_size=file_size, bucket=bucket, room=room)
        self.lock = threading.Lock()
        self._start_again = -math.inf
        """When volumes that do not run, and could, are started next."""
        self._starts = Rests(clock)
        """Of volumes, by number, that could not be started."""
        self._renewals = Rests(clock)
        """Of volumes, by number, that were emptied in vain."""
        self._stops = Rests(clock)
        """Of volumes, by number, that were not released when they were to stop."""
        self._removals = Rests(clock)
        """Of volumes, by number, that could not be removed."""
        self._joins = Rests(clock)
        """Of members that no volume takes."""
        self._troubles: dict[str, str] = {}
        """By number, why a volume could not be started, stopped or removed, whichever was tried last."""
        self._held_up: set[str] = set()
        """Numbers of the volumes that could not be stopped, or removed, the last time."""
        self._leaving: set[str] = set()
        """Numbers of the volumes that are to be removed, and could not be yet."""
        self._erased: set[str] = set()
        """Of these, the numbers of those that are recorded, and else gone."""
        self._used_by_others: dict[str, list[str]] = {}
        """By number, for whom a volume runs on, as was said of it."""
        self._refused = False
        """Whether a volume did not take the last member that was to join one."""
        self._full: set[str] = set()
        """Numbers of the volumes that had no number left for the last member."""
        self._held: set[str] = set()
        """Numbers of the volumes that had no number left, and were not emptied since somebody else used them."""
        self._vain: dict[str, tuple[int, str]] = {}
        """By number, how often a volume without a number left was emptied in vain, and what came of it last."""
        self._said: dict[str, set[str]] = {}
        """By member, what was said of why it has no volume."""

    # What follows wants the lock

    def start(self) -> None:
        """Have all volumes run; those that cannot are left out."""
        try:
            volumes = self.volumes.recorded()
        except (DriverError, OSError) as error:
            log.error("there is no cache volume: %s", error)
            return
        for path, number in volumes.items():
            if number not in self._leaving and not self._starts.lasts(number):
                self._start(path, number)

    def _start(self, path: Path, number: str) -> None:
        began = self._clock()
        try:
            self.volumes.start(path, number)
        except (DriverError, OSError) as error:
            rest = PATIENCE * (self._clock() - began)
            # One that does not answer is asked for no longer than Beginnings does, and may only have to spin up.
            self._starts.begin(number, min(RETRY, rest) if isinstance(error, BadVolume) else rest)
            self._note(path, number, f"it could not be started: {error}; this is tried again while images are open")
        else:
            self._starts.end(number)
            self._is_released(number)

    def _is_released(self, number: str) -> None:
        self._stops.end(number)
        self._removals.end(number)
        self._held_up.discard(number)
        self._troubles.pop(number, None)

    def _note(self, path: Path, number: str, trouble: str) -> None:
        """A volume could not be started, stopped or removed. It is not said once more with each try."""
        if self._troubles.get(number) != trouble:
            log.error("cache volume %s: %s", path, trouble)
        self._troubles[number] = trouble

    def stop_if_unused(self) -> None:
        """Stop all volumes if there is no member any more, but those to which somebody else has attached a device.

        One that was slow and in vain is not tried again for a while. Raises the first error after all were tried, but
        none of a removal, which goes on by itself.
        """
        images = set(devmapper.names(IMAGE))
        for below in [name for name in self._said if name.startswith(IMAGE) and name not in images]:
            self.forget(below)
        if images or devmapper.names(DEVICE):
            return
        self._release_quietly(self._leaving)
        self._release([number for number in self.volumes.recorded().values() if number not in self._leaving])

    def _release_quietly(self, numbers: Collection[str]) -> None:
        with contextlib.suppress(DriverError, OSError):  # it was logged, and status says so
            self._release(numbers)

    def _release(self, numbers: Collection[str]) -> None:
        """Stop these, or remove those that are to be. Raises the first error after all were tried."""
        errors: list[Exception] = []
        for path, number in self.volumes.recorded().items():
            if number not in numbers:
                continue
            try:
                if strangers := self._strangers(number):
                    self._runs_on(path, number, strangers)
                elif not self._stops.lasts(number):
                    self._used_by_others.pop(number, None)
                    (self._take_out if number in self._leaving else self._stop)(path, number)
            except (DriverError, OSError) as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _runs_on(self, path: Path, number: str, strangers: list[str]) -> None:
        if number in self._leaving:
            self._note(path, number, _REMOVAL.format(f"this is attached to it: {', '.join(strangers)}"))
        elif self._used_by_others.get(number) != strangers:
            log.warning("the cache volume %s runs on: %s is attached to it", path, ", ".join(strangers))
        self._used_by_others[number] = strangers

    def _stop(self, path: Path, number: str, *, empty: bool = False) -> None:
        began = self._clock()
        try:
            self.volumes.stop(path, number, empty=empty)
        except (DriverError, OSError) as error:
            self._stops.begin(number, PATIENCE * (self._clock() - began))
            self._held_up.add(number)
            if number not in self._leaving:
                self._note(path, number, _STOP.format(_why(error)))
            raise
        if number in self._held_up - self._leaving:
            log.info("cache volume %s: it is released", path)
            self._starts.end(number)
            self._is_released(number)

    def runs(self) -> bool:
        """Whether there is a volume to join."""
        return bool(self._by_room())

    def join(self, below: str, leaving: str = "") -> bool:
        """Whether a member has a volume. One without is attached to that with the most room for each of its members.

        ``leaving``: the number of a volume that it must not join.
        """
        self._refused = False
        self._full.clear()
        if not devmapper.exists(below) or not bcachedev.settings(below).exists():
            return False
        if bcachedev.set_of(below) is not None:
            return True
        homes = [(number, home) for (_, number), home in self._by_room() if number != leaving]
        return any(self._attach(below, number, home) for number, home in homes)

    def join_or_renew(self, below: str) -> bool:
        """Whether a member has a volume, if need be one that starts empty for it.

        A volume that has given all its numbers away takes no more. It is emptied, and no other: what one holds of
        others that refuses a member for another reason stays, since nothing is gained then. So does what one holds to
        which somebody else has attached a device: the member goes on without a volume. So it does if that volume cannot
        be emptied, and for a while after.
        """
        return self.join(below) or self._renew(below)

    def _renew(self, below: str) -> bool:
        """Whether a member that was just refused has a volume that starts empty for it."""
        for path, number in self._renewable(below)[:1]:
            began = self._clock()
            times, _ = self._vain.get(number, (0, ""))  # the first one that joins has it forgotten
            try:
                self._start_empty(path, number)
            except (DriverError, OSError) as error:
                why = f"could not be emptied: {error}"
            else:
                self._rejoin()
                if self.join(below):
                    return True
                if number not in self._full:
                    return False  # it does not run, which is another matter, or not for want of numbers
                why = "was emptied in vain"
            self._say(below, f"it goes on without the cache volume {path}, which {why}")
            self._let_be(number, times, why, self._clock() - began)
        return False

    def _let_be(self, number: str, times: int, why: str, took: float) -> None:
        """Do not empty a volume again soon: its members are sent away each time, and everybody waits meanwhile.

        ``times``: how often it was emptied in vain before.
        """
        self._vain[number] = times + 1, why
        self._renewals.begin(number, max(growing(times, RETRY, LONGEST), PATIENCE * took))

    def _renewable(self, below: str) -> list[tuple[Path, str]]:
        """The volumes that have no number left for this member, and may be emptied now."""
        found = []
        for (path, number), _ in self._by_room():
            if number not in self._full or self._renewals.lasts(number):
                continue
            if strangers := self._strangers(number):
                self._held.add(number)
                self._say(below, f"the cache volume {path} does not take it: {_held_by(strangers)}")
            else:
                found.append((path, number))
        return found

    def _start_empty(self, path: Path, number: str) -> None:
        """Have a volume that runs begin anew."""
        self.volumes.check(path, number)  # before anybody is sent away for it
        log.warning("the cache volume %s starts empty: it takes no more members", path)
        self._clear(path, number)
        self._stop(path, number, empty=True)
        self._start(path, number)

    def look_after(self, below: str) -> None:
        """As ``try_to_join``, for an image that is in use, if it does not rest."""
        try:
            if not self.rests(below):
                self.try_to_join(below)
        except (DriverError, OSError) as error:
            self._say(below, f"it goes on without a cache volume: {error}")

    def try_to_join(self, below: str) -> bool:
        """As ``join_or_renew``. One that is refused rests, and one that fails does for longer if that took long."""
        began = self._clock()
        try:
            if self.join(below):
                return True
            refused = self._refused  # this one; others join while a volume is emptied
            joined = self._renew(below)
        except (DriverError, OSError):
            self._joins.begin(below, max(RETRY, PATIENCE * (self._clock() - began)))
            raise
        if refused and not joined:
            self._joins.begin(below, RETRY)
        return joined

    def rests(self, below: str) -> bool:
        """Whether no volume took a member a short while ago."""
        return self._joins.lasts(below)

    def forget(self, below: str) -> None:
        """A member is gone."""
        self._said.pop(below, None)
        self._joins.end(below)

    def _attach(self, below: str, number: str, home: Path) -> bool:
        refusal = bcachedev.attach(below, home)
        if bcachedev.set_of(below) is not None:
            self._joins.end(below)
            self._said.pop(below, None)
            self._has_room(number)
            return True
        self._refused = True
        if bcachedev.is_full(refusal):
            self._full.add(number)
        self._say(below, f"it is not attached to {home.name}: {'; '.join(refusal) or 'bcache gives no reason'}")
        return False

    def _has_room(self, number: str) -> None:
        """A volume takes members."""
        self._held.discard(number)
        self._vain.pop(number, None)

    def _say(self, below: str, why: str) -> None:
        """Tell why a member has no volume, but not once more with each try."""
        said = self._said.setdefault(below, set())
        if why not in said:
            said.add(why)
            log.warning("%s: %s", below, why)

    def _rejoin(self) -> None:
        """Have images join. After an error those that are left join by themselves: nobody is kept waiting for more."""
        for below in sorted(devmapper.names(IMAGE)):
            try:
                self.join(below)
            except (DriverError, OSError) as error:
                self._say(below, f"it goes on without a cache volume: {error}")
                return

    def _clear(self, path: Path, number: str) -> None:
        """Let the members of a volume go on without it, images on others if there are.

        Raises VolumeInUse, before anything is changed, if somebody else has attached a device.
        """
        if strangers := self._strangers(number):
            raise VolumeInUse(path, strangers)
        members = self._attached(number)
        for below in members:
            bcachedev.detach(below)
            if below.startswith(IMAGE):
                self.join(below, leaving=number)
        if members:
            log.info("cache volume %s: %s leave it", path, ", ".join(members))

    def _attached(self, number: str) -> list[str]:
        """What is attached to a volume, if the kernel has it."""
        home = self.volumes.home(number)
        return bcachedev.attached(home) if home else []

    def _strangers(self, number: str) -> list[str]:
        """The devices of somebody else that are attached to a volume."""
        return [name for name in self._attached(number) if not _is_ours(name)]

    def _by_room(self) -> list[tuple[tuple[Path, str], Path]]:
        """The volumes that run and are to, with their sets, the best for one more member first."""
        found = [volume for volume in self.volumes.recorded().items() if volume[1] not in self._leaving]
        sets = [(volume, home) for volume in found if (home := self.volumes.running(volume[1]))]
        return sorted(sets, key=lambda item: -size_of(item[0][0]) / (1 + len(bcachedev.attached(item[1]))))

    # What follows takes the lock

    def described(self) -> list[Volume]:
        """All volumes, also those that have failed or are missing, and the first one while there is no room for it.

        One that could run is started, if images are open: its disk was away, or there was no room for it, when they
        were opened, by this agent or one before. Removals go on that were in vain, and while no image is open stops.
        What is in vain once more is tried again after a while.
        """
        found = self._described()
        wanting = self._leaving or self._held_up or any(volume.state is VolumeState.IDLE for volume in found)
        if wanting and self._clock() >= self._start_again:
            with self.lock:
                try:
                    self._settle()
                finally:
                    self._start_again = self._clock() + RETRY
            found = self._described()
        return found

    def _described(self) -> list[Volume]:
        with self.lock:
            found = [(path, number, self._use(number)) for path, number in self.volumes.recorded().items()]
            for _, number, _ in found:
                if home := self.volumes.running(number):
                    with contextlib.suppress(OSError):  # it is failing, and shows it next time
                        self.volumes.replacement.keep(home)
        if not found and self.volumes.no_room:
            return [Volume(self.volumes.default, 0, (), VolumeState.IDLE, trouble=self.volumes.no_room)]
        # Nobody who opens an image waits while a dying disk is asked what is on it.
        return [self._describe(*volume) for volume in found]

    def _settle(self) -> None:
        """Have removals end, and volumes run if there are members; else stop those that were not released."""
        members = devmapper.names(IMAGE) | devmapper.names(DEVICE)
        removals = {number for number in self._leaving if not self._removals.lasts(number)}
        self._release_quietly(removals if members else removals | self._held_up - self._leaving)
        if members:
            self.start()
            self._rejoin()

    def add(self, path: Path) -> Volume:
        """As ``add_volume`` of the driver."""
        with self.lock:
            volumes = self.volumes.recorded()
            before = volumes.get(path, "")
            if before in {"", *self._erased}:
                volumes = self.volumes.record({**volumes, path: self.volumes.make(path)})
                self._held_up.discard(before)
            self._leaving.discard(before)
            self._erased.discard(before)
            self._removals.end(before)
            # Who adds one that is there has mended it, and asks for it now.
            self._starts.end(volumes[path])
            self._renewals.end(volumes[path])
            self._stops.end(volumes[path])
            self._troubles.pop(volumes[path], None)
            self._vain.pop(volumes[path], None)
            self._settle()
            self._joins.clear()  # the next look at a member has it emptied, if need be
            return self._describe(path, volumes[path], self._use(volumes[path]))

    def remove(self, path: Path) -> bool:
        """As ``remove_volume`` of the driver."""
        with self.lock:
            number = self.volumes.recorded().get(path)
            if number is None:
                return False
            if strangers := self._strangers(number):
                raise VolumeInUse(path, strangers)
            self._leaving.add(number)
            self._take_out(path, number)
            return True

    def _take_out(self, path: Path, number: str) -> None:
        """Remove a volume. Its members go on without it. What is in vain the next look tries, or the next removal."""
        began = self._clock()
        try:
            stays = "" if number in self._erased else self._give_back(path, number)
            self.volumes.record({other: its for other, its in self.volumes.recorded().items() if other != path})
        except (DriverError, OSError) as error:
            self._removals.begin(number, PATIENCE * (self._clock() - began))
            self._held_up.add(number)
            record = "volumes.json in the state folder cannot be written: " if number in self._erased else ""
            self._note(path, number, _REMOVAL.format(record + _why(error)))
            raise
        self._leaving.discard(number)
        self._erased.discard(number)
        self._is_released(number)
        self._has_room(number)  # nobody will say so of it any more
        if stays:
            log.warning("cache volume %s: it is removed, but may stay as it is: %s", path, stays)
        else:
            log.info("cache volume %s: it is removed", path)

    def _give_back(self, path: Path, number: str) -> str:
        """Release a volume and erase it. Returns why it may not be erased; nothing if it is."""
        self._clear(path, number)
        self._stop(path, number)
        try:
            if not self.volumes.erase(path, number):
                return "it is not there, or does not answer"
        except OSError as error:
            return str(error)
        self._erased.add(number)
        return ""

    def _use(self, number: str) -> tuple[VolumeState | None, list[str]]:
        """How a volume is, if that can be told without a look at its disk, and what is attached to it."""
        if number in self.volumes.stopping:
            return VolumeState.IDLE, []
        if self.volumes.failed(number):
            return VolumeState.FAILED, []
        home = self.volumes.running(number)
        if home is None:
            return VolumeState.IDLE if number in self._leaving else None, []
        return VolumeState.RUNNING, sorted(bcachedev.attached(home))

    def _describe(self, path: Path, number: str, use: tuple[VolumeState | None, list[str]]) -> Volume:
        # What answers is asked for with a limit, and what may not answer is not opened.
        runs = use[0] in (VolumeState.RUNNING, VolumeState.FAILED)
        found = VolumeState.RUNNING if runs else self.volumes.unused_state(path, number)
        state = use[0] or found
        images = [below.removeprefix(IMAGE).rpartition("-")[0] for below in use[1] if below.startswith(IMAGE)]
        devices = [below.removeprefix(DEVICE) for below in use[1] if below.startswith(DEVICE)]
        size = 0 if found is VolumeState.MISSING else size_of(path)
        return Volume(path, size, tuple(images), state, tuple(devices), self._trouble(number, state, use[1]))

    def _trouble(self, number: str, state: VolumeState, attached: list[str]) -> str:
        """Why a volume takes no more members, or could not be started; what was so once and is not is left out."""
        why = self._troubles.get(number, "")
        if why and (state is VolumeState.IDLE or number in self._leaving | self._held_up):
            return why
        if state not in (VolumeState.IDLE, VolumeState.RUNNING):
            return ""
        strangers = [name for name in attached if not _is_ours(name)]
        if number in self._held and strangers:
            return _held_by(strangers)
        if number not in self._vain:
            return ""
        return f"{_FULL}, and {self._vain[number][1]}; this is tried again, and soon after it is added again"


def _why(error: Exception) -> str:
    """The same for the same trouble, whatever a temporary file was called."""
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def _held_by(strangers: list[str]) -> str:
    return f"{_FULL}, and is not emptied while this is attached to it: {', '.join(strangers)}"


def _is_ours(name: str) -> bool:
    """Whether what is attached to a volume is a member."""
    return name.startswith((IMAGE, DEVICE))
