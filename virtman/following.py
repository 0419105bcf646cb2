"""Keeps a stack at its place in Volt's tree: parents, children, and a place that Volt has forgotten."""

from __future__ import annotations

import logging

from drivers.base import Child, Parent
from virtman.errors import Conflict, ContentChanged, CoordinatorDown, UnknownImage
from virtman.records import ImageRecord, Role
from virtman.serving import admit_recorded, restore
from virtman.stacks import Stacks
from volt.client import Assignment

log = logging.getLogger(__name__)


def with_assignment(record: ImageRecord, assignment: Assignment, *, confirmed: bool) -> ImageRecord:
    """The record with what Volt said. ``confirmed``: the host reads from these parents now."""
    return record.model_copy(
        update={
            "size": assignment.size,
            "digest": assignment.digest,
            "slot": assignment.slot,
            "parents": tuple(
                Parent(p.host, p.address, p.secret, p.ticket, assignment.revision, p.far) for p in assignment.parents
            ),
            "children": tuple(Child(c.host, c.secret) for c in assignment.children),
            "serving_key": assignment.serving_key,
            "assigned": assignment.revision,
            "revision": assignment.revision if confirmed else record.revision,
        }
    )


def admit(stacks: Stacks, assignment: Assignment) -> None:
    """Admit the children that Volt names now. This does not wait for operations on the image.

    If Volt has other content under this name, nothing happens, and ``follow`` leaves the tree.
    """
    record = stacks.records.get(assignment.image)
    if record is not None and record.digest == assignment.digest:
        children = [Child(child.host, child.secret) for child in assignment.children]
        stacks.source.admit(assignment.image, assignment.revision, children, serving_key=assignment.serving_key)


def follow(stacks: Stacks, assignment: Assignment) -> None:
    """Read from the parents that Volt names now, and record them, so that the next heartbeat confirms them.

    Raises ContentChanged, DriverError, NoRoom.
    """
    with stacks.holding(assignment.image) as record:
        if record is not None and record.steady and assignment.revision > record.revision:
            _follow(stacks, record, assignment)


def _follow(stacks: Stacks, record: ImageRecord, assignment: Assignment) -> None:
    if assignment.digest != record.digest:
        stacks.volt.leave(record.name)
        raise _content_changed(record)
    wanted = with_assignment(record, assignment, confirmed=False)
    stacks.records.put(record.name, wanted)
    stacks.step("follow:recorded")
    if record.role is Role.HOST:
        stacks.check_not_suspended()
        stacks.source.follow(wanted.image, wanted.sources, sure=not record.unconfirmed)
    admit_recorded(stacks, wanted)
    stacks.records.put(record.name, with_assignment(record, assignment, confirmed=True))
    stacks.changed()


def rejoin(stacks: Stacks, name: str) -> None:
    """Take a place in the tree again: Volt has forgotten that this host has the image, after its lease ended, say.

    Raises ContentChanged, Conflict, CoordinatorDown, DriverError.
    """
    with stacks.holding(name) as record:
        if record is None or not record.steady:
            return
        if record.role is Role.ORIGIN:
            raise Conflict(
                f"Volt does not list this host as an origin of image {name!r} any more; publish it again, or give"
                f" it up: virtman unpublish {name}"
            )
        try:
            content = stacks.volt.image(name).digest
        except UnknownImage as error:
            raise Conflict(f"Volt does not list image {name!r} any more; its VMs here go on") from error
        if content != record.digest:
            raise _content_changed(record)
        stacks.source.close(name)  # a Volt that has forgotten may count revisions anew
        _follow(stacks, record, stacks.volt.join(name))


def report_lost(stacks: Stacks, name: str, host: str) -> Assignment | None:
    """Have the stack drop a parent that is dead, and tell Volt. Returns Volt's answer, to be followed.

    If Volt is down this is not repeated: Volt notices by itself that a host is gone, and the host may be back.
    Raises DriverError, NoRoom.
    """
    restore(stacks, name)  # replaces the export only if it may still have a connection to the lost parent
    try:
        return stacks.volt.report(name, host)
    except (CoordinatorDown, UnknownImage) as error:
        log.warning("image %s: parent %s lost; Volt cannot be told: %s", name, host, error)
        return None


def leave_unknown(stacks: Stacks, name: str) -> None:
    """Give up a place that Volt says this host has, though there is no stack.

    Raises CoordinatorDown, VoltRefused (the image has no other origin: this may be the place of another agent).
    """
    with stacks.holding(name) as record:
        if record is None:
            stacks.volt.leave(name)


def _content_changed(record: ImageRecord) -> ContentChanged:
    return ContentChanged(
        f"Volt has other content under the name {record.name!r} now: this host left its tree, and its VMs of the old"
        " content go on with what its cache holds; destroy them, then virtman gc, to get the new content"
    )
