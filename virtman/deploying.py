"""What this host does of deployments, as the answers to its heartbeats say.

A deployment has the host keep all of an image until a time: that is hydration with an end (virtman/hydrating.py). Volt
repeats what is wanted until it has heard that the host is done, so nothing of a deployment is kept in records. The
reconciler fills the image, whatever starts again meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from drivers.errors import NoSpace
from virtman import hydrating
from virtman.errors import (
    BadRequest,
    Conflict,
    ContentChanged,
    ImageWithdrawn,
    NoRoom,
    NotSupported,
    StateDamaged,
    UnknownImage,
)
from virtman.records import ImageRecord, Role
from virtman.stacks import Stacks
from virtman.transferring import Transfers
from virtman.workqueue import Job, Pool, WorkQueue
from volt.client import TransferReport, TransferState, TransferTask
from volt.deploymodels import UNDER_WAY

log = logging.getLogger(__name__)

DEPLOYMENT, HYDRATION = "deployment ", "hydration of "
"""Keys: what is to be done of a deployment, whose number follows; what is read behind demand, of an image."""

IN_VAIN = (BadRequest, ContentChanged, ImageWithdrawn, NoRoom, NoSpace, NotSupported, UnknownImage)
"""Errors that end a host's part in a deployment. All others are tried again."""

IDLE = "lazy"
"""The method by which an image is read behind all else; by the others, as fast as VMs that read meanwhile allow."""
BY_TREE_MEANWHILE = "auto"
"""The method that needs what the tree brings meanwhile; the others bring what the tree does not need to."""


class DeploymentKeeper:
    """Keeps the images of ``stacks`` that this host is to have as a whole."""

    def __init__(self, stacks: Stacks, queue: WorkQueue, transfers: Transfers) -> None:
        self._stacks, self._queue, self.transfers = stacks, queue, transfers
        self._tasks: dict[int, TransferTask] = {}
        """What Volt said last."""
        self._failed: dict[int, str] = {}
        """Why this host's part in a deployment has ended, until Volt has heard it."""

    # What happens

    def hear(self, tasks: Sequence[TransferTask]) -> None:
        """Volt has answered a heartbeat. Returns at once."""
        before, self._tasks = self._tasks, {task.deployment: task for task in tasks}
        self._failed = {number: why for number, why in self._failed.copy().items() if number in self._tasks}
        self.transfers.hear(tasks)
        for number in self._tasks:
            self._queue.wake(f"{DEPLOYMENT}{number}")
        for image in {task.image for task in (*before.values(), *self._tasks.values())}:
            self._queue.wake(HYDRATION + image)

    def reports(self) -> list[TransferReport]:
        """How far this host is. Touches nothing that could be slow."""
        return [self._report(task) for task in self._tasks.values()]

    def _report(self, task: TransferTask) -> TransferReport:
        return self._sender_report(task) if task.sends else self._receiver_report(task)

    def _sender_report(self, task: TransferTask) -> TransferReport:
        why = self._failed.get(task.deployment, "")
        part = self.transfers.part(task.deployment)
        if why or part is None:
            state = TransferState.FAILED if why else TransferState.WAITING
            why = why or self._queue.troubles().get(f"{DEPLOYMENT}{task.deployment}", "")
            return TransferReport(
                deployment=task.deployment, sends=True, method=task.method, state=state, error=why[:1000]
            )
        return TransferReport(
            deployment=task.deployment, sends=True, method=task.method, state=part.state, attempt=part.attempt,
            contact=part.contact, sent=part.sent, error=part.error,
        )  # fmt: skip

    def _receiver_report(self, task: TransferTask) -> TransferReport:
        troubles = self._queue.troubles()
        why = troubles.get(f"{DEPLOYMENT}{task.deployment}") or troubles.get(HYDRATION + task.image, "")
        if self._stacks.suspended:
            why = "this host is suspended; start its agent again"
        done = total = 0
        try:
            record = self._stacks.records.get(task.image)
            state = self._state(task, record)
            if record is not None and record.role is Role.HOST and record.size is not None:
                total = record.size
                done = total if state is TransferState.WHOLE else self._stacks.source.filled(task.image).done
        except StateDamaged as error:
            state, why = TransferState.WAITING, str(error)
        part = self.transfers.part(task.deployment)
        if part is None:
            told: dict[str, Any] = {}
        else:
            done = max(done, total - part.missing + part.kept)
            told = {"attempt": part.attempt, "contact": part.contact, "lacks": part.lacks, "sent": part.sent}
            told |= part.findings
            why = why or part.error
        if _is_over(task) and state in UNDER_WAY:
            state, why = TransferState.FAILED, "the time for which the image was to stay is over"
        if task.deployment in self._failed:
            state, why = TransferState.FAILED, self._failed[task.deployment]
        return TransferReport(
            deployment=task.deployment, method=task.method, state=state, done=done, total=total, error=why[:1000],
            **told,
        )  # fmt: skip

    def _state(self, task: TransferTask, record: ImageRecord | None) -> TransferState:
        if record is not None and record.role is Role.ORIGIN and record.steady and not _is_another(record, task):
            return TransferState.WHOLE
        if task.cancelled and not self._is_for(record, task):
            return TransferState.CANCELLED
        if record is None or _is_another(record, task) or not self._is_kept(record, task):
            return TransferState.WAITING
        if hydrating.is_whole(self._stacks, record):
            return TransferState.WHOLE
        part = self.transfers.part(task.deployment)
        if self.transfers.knows(task) and (part is None or part.state is TransferState.WAITING):
            return TransferState.WAITING
        return TransferState.FILLING if task.go else TransferState.READY

    # What is to be done

    def plan(self, number: str) -> Job | None:
        """The next thing to do for a deployment."""
        task = self._tasks.get(int(number))
        if task is None or task.deployment in self._failed:
            return None
        record = self._stacks.records.get(task.image)
        if _is_another(record, task) and not task.cancelled:
            return Job("say that it has other content", partial(self._attempt, task, self._refuse))
        if not task.sends:
            return self._plan_receiving(task, record)
        if self._lacks_part(task):
            return Job("get ready to send", partial(self._attempt, task, self._take_part))
        return None

    def _plan_receiving(self, task: TransferTask, record: ImageRecord | None) -> Job | None:
        if record is not None and record.role is Role.ORIGIN and record.steady:
            return None
        if task.cancelled or _is_over(task):
            ends = record is not None and self._is_for(record, task) and not hydrating.is_whole(self._stacks, record)
            return Job("end", partial(self._attempt, task, self._end)) if ends else None
        if record is None or not self._is_kept(record, task):
            return Job("keep all of it", partial(self._attempt, task, self._keep), Pool.VOLT)
        if record.first != task.source:
            return Job("read from another host", partial(self._attempt, task, self._prefer))
        if self._lacks_part(task) and not hydrating.is_whole(self._stacks, record):
            return Job("get ready to receive", partial(self._attempt, task, self._take_part))
        return None

    def _lacks_part(self, task: TransferTask) -> bool:
        return self.transfers.knows(task) and self.transfers.part(task.deployment) is None

    def plan_hydration(self, record: ImageRecord) -> Job | None:
        """Whether all of an image is to be here, and to stay, and is not or does not."""
        name = record.name
        if record.hydrate and record.hydrate_until is not None and record.hydrate_until <= time.time():
            return Job("let it go", partial(hydrating.cancel, self._stacks, name))
        if not hydrating.is_wanted(self._stacks, record):
            return None
        if hydrating.may_go(self._stacks, record):
            return Job("pin", partial(hydrating.pin, self._stacks, name), on_demand=True)
        tasks = [task for task in self._tasks.values() if task.image == name and not task.cancelled]
        has_turn = not tasks or any(self._has_turn(task) for task in tasks)
        together = any(self.transfers.knows(task) for task in tasks)
        if together and not has_turn and hydrating.goes_on(self._stacks, record):
            return Job("read no more", partial(hydrating.pause, self._stacks, name))
        if has_turn and hydrating.lacks(self._stacks, record):
            urgent = any(task.go and task.method != IDLE for task in tasks)
            limits = [task.limit for task in tasks if task.go]
            rate = None if None in limits else max((limit for limit in limits if limit), default=None)
            return Job("fill", partial(self._fill, record, idle=not urgent, rate=rate))
        return None

    def _has_turn(self, task: TransferTask) -> bool:
        """Whether what is missing is to be read now: not while it comes another way."""
        part = self.transfers.part(task.deployment)
        return task.go and (part is None or part.over or part.method == BY_TREE_MEANWHILE)

    def _is_kept(self, record: ImageRecord, task: TransferTask) -> bool:
        """Whether all of the image is to be here for as long as the deployment wants."""
        until = record.hydrate_until
        return record.steady and record.hydrate and (until is None or until >= task.keep_until)

    def _is_for(self, record: ImageRecord | None, task: TransferTask) -> bool:
        """Whether all of the image is to be here because of this deployment, and nobody has asked for longer."""
        return record is not None and record.hydrate and record.hydrate_until == task.keep_until

    def _attempt(self, task: TransferTask, act: Callable[[TransferTask], None]) -> None:
        """Do a step of a deployment. An error that no further try would end ends this host's part."""
        try:
            act(task)
        except IN_VAIN as error:
            self._fail(task, error)

    def _fail(self, task: TransferTask, error: Exception) -> None:
        log.warning("deployment %d of image %s fails here: %s", task.deployment, task.image, error)
        self._failed[task.deployment] = " ".join(str(error).split())[:1000]
        self._stacks.changed()

    def _keep(self, task: TransferTask) -> None:
        record = hydrating.begin(self._stacks, task.image, until=task.keep_until)
        if _is_another(record, task):
            hydrating.cancel(self._stacks, task.image)
            self._refuse(task)
        self._stacks.changed()

    def _refuse(self, task: TransferTask) -> None:
        raise ContentChanged(f"Volt has other content under the name {task.image!r} now than this host has")

    def _prefer(self, task: TransferTask) -> None:
        with self._stacks.holding(task.image) as record:
            if record is None or not record.steady:
                return
            wanted = record.model_copy(update={"first": task.source})
            self._stacks.source.follow(wanted.image, wanted.sources, sure=not record.unconfirmed)
            self._stacks.records.put(record.name, wanted)

    def _take_part(self, task: TransferTask) -> None:
        record = self._stacks.records.get(task.image)
        if record is None or record.digest != task.digest:
            raise ContentChanged(f"this host has not the content that Volt has under the name {task.image!r}")
        if not record.steady:
            raise Conflict(f"image {task.image!r} is being changed")
        self.transfers.take_part(task, record.image)

    def _end(self, task: TransferTask) -> None:
        hydrating.cancel(self._stacks, task.image)
        self._stacks.changed()

    def _fill(self, record: ImageRecord, *, idle: bool, rate: int | None) -> None:
        """Begin to read what is missing. Without room for it the host's part in deployments of the image has ended."""
        try:
            hydrating.fill(self._stacks, record.name, idle=idle, rate=rate)
        except NoSpace as error:
            tasks = [task for task in self._tasks.values() if task.image == record.name]
            if not tasks:
                raise
            for task in tasks:
                self._fail(task, error)
            if any(self._is_for(record, task) for task in tasks):
                hydrating.cancel(self._stacks, record.name)


def _is_another(record: ImageRecord | None, task: TransferTask) -> bool:
    """Whether what this host has under the image's name is something else."""
    return record is not None and record.digest not in (None, task.digest)


def _is_over(task: TransferTask) -> bool:
    """Whether the image need not stay any more, be it whole or not."""
    return task.keep_until <= time.time()
