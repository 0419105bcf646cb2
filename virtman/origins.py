"""This host serves an image as its origin, announces the image to Volt, and stops doing so."""

from __future__ import annotations

from drivers.base import Image
from virtman import inplace
from virtman.errors import CoordinatorDown, HostTaken, ImageExists, ImageInUse, UnknownImage
from virtman.following import with_assignment
from virtman.hosting import remove_if
from virtman.operations import Kind
from virtman.records import DETACH, PUBLISH, SERVED, ImageRecord, InPlace, Role, State
from virtman.serving import admit_recorded, build, remove_layers
from virtman.stacks import Stacks


def not_this_content(record: ImageRecord) -> ImageExists:
    """The error for an image that is on this host already, from other content or in another way."""
    if record.role is Role.HOST:
        how, way_out = "read from other hosts", ""
    else:
        how = "published as a copy" if record.in_place is None else f"published in place, from {record.in_place.path}"
        way_out = f", or: virtman unpublish {record.name}"
    return ImageExists(
        f"image {record.name!r} is on this host already, {how}, and not from this content; choose another name{way_out}"
    )


def add_origin(
    stacks: Stacks, image: Image, in_place: InPlace | None = None, parent: str | None = None
) -> ImageRecord:  # fmt: skip
    """Serve an image whose content is in the store, or ``in_place``, and announce the image.

    ``parent``: the image that this one was made of, if known.

    Raises ImageExists, HostTaken, DriverError, NoRoom: then the image is not published. Raises CoordinatorDown: then
    Volt may have the image, so this host goes on serving it, and announces it again when Volt answers.
    """
    with stacks.holding(image.name) as before:
        record = None if before is None else _published_before(stacks, before, image, in_place, parent)
        if record is not None and record.steady:
            return _announce(stacks, build(stacks, record))  # the image stays published, whatever fails
        record = record or ImageRecord(
            name=image.name, role=Role.ORIGIN, state=State.ABSENT, size=image.size, digest=image.digest,
            in_place=in_place, parent=parent,
        ).begin(PUBLISH)  # fmt: skip
        with stacks.store.lock:
            stacks.operations.begin(record)
        return stacks.operations.carry_out(record)


def _published_before(
    stacks: Stacks, record: ImageRecord, image: Image, in_place: InPlace | None, parent: str | None
) -> ImageRecord | None:
    """The record of an image that is published again; None if the publication begins from nothing. Raises ImageExists.

    If Volt may have the image of a stack that is half removed, this host is not asked to leave: Volt may refuse that,
    because others read the image.
    """
    known = record.in_place
    if record.role is Role.HOST or record.digest != image.digest or (known is None) != (in_place is None):
        raise not_this_content(record)
    if known is not None and in_place is not None and inplace.differs(known, in_place):
        record = remove_layers(stacks, record)
    update = {"given_up": False, "in_place": in_place, "parent": parent or record.parent}
    wanted = record.model_copy(update=update)
    if wanted != record:
        stacks.records.put(record.name, wanted)  # before Volt may list it
    if not wanted.doing(DETACH):
        return wanted
    if wanted.argument("told"):
        return wanted.settled(State.ABSENT).begin(PUBLISH).reached(SERVED)
    stacks.operations.carry_out(wanted)
    return None


def _finish_publish(stacks: Stacks, record: ImageRecord) -> ImageRecord:
    """Serve and announce. Once the image is served, Volt may have it, and others may read it."""
    record = build(stacks, record)
    stacks.step("publish:serving")
    if not _is_served(record):
        record = record.reached(SERVED)
        stacks.records.put(record.name, record)
    try:
        return _announce(stacks, record)
    except HostTaken:
        raise
    except CoordinatorDown as error:
        raise CoordinatorDown(
            f"{error}; image {record.name!r} is kept and announced when Volt answers; then it can be taken back by:"
            f" virtman unpublish {record.name}"
        ) from error


def _announce(stacks: Stacks, record: ImageRecord) -> ImageRecord:
    assignment = stacks.volt.publish(record.image, record.parent)
    if assignment.revision < record.assigned:
        stacks.source.close(record.name)  # a Volt that has forgotten may count revisions anew
    record = with_assignment(record, assignment, confirmed=True).settled()
    admit_recorded(stacks, record)  # some may have joined already
    stacks.records.put(record.name, record)
    stacks.changed()
    return record


def take_back(stacks: Stacks, name: str) -> bool:
    """Stop serving an image that is yet to be announced, once Volt has agreed; until then nothing changes.

    Each call to Volt that failed may have taken effect, so other hosts may read the image; only Volt knows. Returns
    False if the image is announced by now, or gone. Raises ImageInUse while a VM of this host or another host reads
    the image; CoordinatorDown, DriverError.
    """

    def allowed(record: ImageRecord) -> bool:
        if not record.doing(PUBLISH):
            return False
        if stacks.in_use(name):
            raise ImageInUse(f"VMs of this host read image {name!r}; destroy them first")
        try:
            stacks.volt.withdraw(name)
        except CoordinatorDown as error:
            raise CoordinatorDown(
                f"{error}; image {name!r} is still served: other hosts may read it, which only Volt knows"
            ) from error
        return True

    return remove_if(stacks, name, allowed, told=False)


def drop_origin(stacks: Stacks, name: str, *, given_up: bool = False) -> bool:
    """Stop serving an image that this host published and Volt no longer lists, unless a VM needs the image.

    ``given_up``: in that case record that the stack is to be dropped after the last VM (``is_unwanted``).
    """

    def allowed(record: ImageRecord) -> bool:
        if record.role is not Role.ORIGIN or not record.steady:
            return False
        used = stacks.in_use(name)
        if used and given_up:
            stacks.records.put(name, record.model_copy(update={"given_up": True}))
        return not used

    return remove_if(stacks, name, allowed, told=False)


def is_unwanted(stacks: Stacks, record: ImageRecord) -> bool:
    """Whether an image was given up, and no VM of this host needs the image any more."""
    return record.given_up and not stacks.in_use(record.name)


def _is_served(record: ImageRecord) -> bool:
    """Whether an image that is being published was served, so that Volt may have it."""
    return record.operation is not None and record.operation.done == SERVED


_REFUSED = (ImageExists, UnknownImage, HostTaken)
"""Volt refuses the image."""


def _undo_publish(_stacks: Stacks, record: ImageRecord, error: Exception | None) -> ImageRecord | None:
    refused = isinstance(error, _REFUSED) or not _is_served(record)
    return record.begin(DETACH, told=False) if refused else None


KINDS = {PUBLISH: Kind(_finish_publish, _undo_publish, gives_up=_REFUSED)}
