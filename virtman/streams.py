"""What VMs' disks hold besides their images goes to other hosts and comes from them as a stream that a caller carries.

The stream is docs/stream.md's. To receive one is an operation of the VM's record that is undone if it does not end.

All snapshots of a stream are held before the first byte goes, and their IDs are read once more: a snapshot that was
deleted and taken anew is another one under the same name. The caller may go silent at any time, while the call holds
the VM's lock. So destroying the VM ends its stream first, and repair does not wait for locks that calls hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack

from drivers.base import Device, Range
from drivers.blocks import Blocks
from virtman import creating, disks, hosting, models
from virtman.convert import Progress
from virtman.errors import BadRequest, Conflict
from virtman.hostfiles import translate_os_errors
from virtman.operations import Kind
from virtman.pipe import Caller
from virtman.receiving import Receiver, starts
from virtman.records import RECEIVE, ImageRecord, Snapshot, VmRecord
from virtman.roles import Permit, anything
from virtman.stream import MOST_DATA, Contents, Data, Header, Reader, Section, Zeros, write
from virtman.vms import Vms

SEND, RECEIVED = "send", "receive"
"""Steps of progress."""

_NOTHING = bytes(MOST_DATA)
_TOLD = 4 << 20
"""Bytes after which progress is told."""


# Sending


def send(
    vms: Vms, vm: str, snapshot: str | None, since: str | None, send_bytes: Callable[[bytes], None],
    progress: Progress, *, with_snapshots: bool = False,
) -> models.Sent:  # fmt: skip
    """Write the stream of a snapshot, or of what the disk holds now; of what changed ``since`` another snapshot.

    ``with_snapshots``: also those before it, after ``since``; of the disk as it is now all that there are. Raises
    UnknownVm, UnknownSnapshot, BadRequest, DriverError, HostTrouble, as ``disks.take``, and as ``send_bytes``.
    """
    with vms.images.keeping(vms.record(vm).image), ExitStack() as stack:
        if snapshot is None:
            last = stack.enter_context(disks.temporary(vms, vm, gone=True))
        else:
            last = disks.require(vms.record(vm), snapshot)
        record = vms.record(vm)
        base = None if since is None else disks.require(record, since)
        snapshots = _chosen(record, last, base, with_snapshots=with_snapshots)
        # All at once: later another snapshot may have the name of one of these.
        devices = [stack.enter_context(vms.vmdisks.reading(vm, snapshot.name)) for snapshot in snapshots]
        parents = [_parent(snapshot, snapshots, base) for snapshot in snapshots]
        ranges = [
            vms.vmdisks.changes(vm, snapshot.name, parent.name if parent else None)
            for snapshot, parent in zip(snapshots, parents, strict=True)
        ]
        _check_stayed(vms.record(vm), snapshots if base is None else [base, *snapshots])
        header = Header(
            image=hosting.ensure(vms.images, record.image).image.digest,
            since=base.id if base else None,
            sections=tuple(map(_section, snapshots, parents)),
            total=sum(changed.length for part in ranges for changed in part),
            data=sum(changed.length for part in ranges for changed in part if not changed.zeros),
        )
        told = _Told(SEND, header, progress)
        for chunk in write(header, map(told, _contents(vms, vm, devices, ranges))):
            send_bytes(chunk)
        kept = sum(section.name is not None for section in header.sections)
        return models.Sent(total=header.total, snapshots=kept, state=last.state)


def _chosen(record: VmRecord, last: Snapshot, base: Snapshot | None, *, with_snapshots: bool) -> list[Snapshot]:
    """The snapshots to send: ``last``, and ``with_snapshots`` those before it and after the base; all snapshots if it
    is the disk of now, and there is no base.

    Raises BadRequest.
    """
    line = record.line(last)
    if base is not None:
        if base not in line[:-1]:
            what = "what the disk holds now" if last.temporary else f"snapshot {last.name!r}"
            before = ", ".join(snapshot.name for snapshot in line[:-1]) or "none"
            raise BadRequest(f"{what} did not go on from snapshot {base.name!r}; these came before it: {before}")
        line = line[line.index(base) + 1 :]
    if not with_snapshots:
        return [last]
    if base is None and last.temporary:
        return [*(snapshot for snapshot in record.snapshots if not snapshot.temporary), last]
    return line


def _parent(snapshot: Snapshot, snapshots: Sequence[Snapshot], base: Snapshot | None) -> Snapshot | None:
    """What a snapshot is over in the stream: what is not over one of the ``snapshots`` sent is over the base."""
    return next((one for one in snapshots if one.name == snapshot.parent), base)


def _section(snapshot: Snapshot, parent: Snapshot | None) -> Section:
    return Section(
        id=snapshot.id, name=None if snapshot.temporary else snapshot.name, parent=parent.id if parent else None,
        size=snapshot.size, taken=snapshot.taken, state=snapshot.state,
    )  # fmt: skip


def _check_stayed(record: VmRecord, snapshots: Sequence[Snapshot]) -> None:
    """The driver was asked by names. Raises BadRequest if one of them may have been another snapshot's."""
    present = {snapshot.id for snapshot in record.snapshots}
    gone = next((snapshot.name for snapshot in snapshots if snapshot.id not in present), None)
    if gone is not None:
        raise BadRequest(f"snapshot {gone!r} of vm {record.name!r} was deleted while it was to be sent; send it again")


def _contents(
    vms: Vms, vm: str, devices: Sequence[Device], ranges: Sequence[Sequence[Range]]
) -> Iterator[Contents]:  # fmt: skip
    """What the ranges of each device hold; a device is open while its contents are read."""
    for device, changed in zip(devices, ranges, strict=True):
        with vms.open_blocks(vm, device) as blocks:
            yield pieces(blocks, changed)
        vms.step("send:section")


def pieces(blocks: Blocks, ranges: Iterable[Range]) -> Contents:
    """What the ranges hold. Raises DriverError, HostTrouble."""
    for changed in ranges:
        if changed.zeros:
            yield Zeros(changed.offset, changed.length)
            continue
        for offset in range(changed.offset, changed.offset + changed.length, MOST_DATA):
            length = min(MOST_DATA, changed.offset + changed.length - offset)
            with translate_os_errors("reading a disk"):
                data = blocks.read(offset, length)
            yield Zeros(offset, length) if data == _NOTHING[:length] else Data(offset, data)


class _Told:
    """Passes contents on, and tells how many bytes of the disk have gone, from time to time."""

    def __init__(self, step: str, header: Header, progress: Progress) -> None:
        self._step, self._total, self._progress = step, header.total, progress
        self._done = self._said = 0

    def __call__(self, contents: Contents) -> Contents:
        """The contents. Raises as ``progress``."""
        for piece in contents:
            yield piece
            self._done += piece.end - piece.offset
            if self._done - self._said >= _TOLD or self._done == self._total:
                self._said = self._done
                self._progress(self._step, self._done, self._total)


# Receiving


def receive_from(
    vms: Vms, vm: str, image: str, caller: Caller, progress: Progress, permit: Permit = anything
) -> None:  # fmt: skip
    """Receive what a caller sends, unless ``Vms.receiving`` ends it. Raises Interrupted, CallerGone, as ``receive``."""
    with vms.receiving.sending(vm, caller):
        receive(vms, vm, image, caller.chunks(), progress, permit)


def receive(
    vms: Vms, vm: str, image: str, chunks: Iterable[bytes], progress: Progress, permit: Permit = anything
) -> None:  # fmt: skip
    """Let there be the VM that a stream has, or let one go on to what it has, if it is one of what changed since.

    Raises BadStream, Conflict, VmExists, VmRuns, UnknownVm, UnknownImage, Forbidden, BadRequest,
    DriverError, NoRoom, HostTrouble, and as ``chunks``; after an error all is as it was before.
    """
    reader = Reader(chunks)
    told = _Told(RECEIVED, reader.header, progress)

    def fill(receiver: Receiver) -> None:
        receiver.fill((section, told(contents)) for section, contents in reader.sections())

    if reader.header.since is None:
        _receive_new(vms, vm, image, reader.header, fill)
    else:
        with vms.changing(vm, permit, arriving=True) as record:
            if record.image != image:
                raise Conflict(f"vm {vm!r} is of image {record.image!r}, not {image!r}")
            _check_image(reader.header, hosting.ensure(vms.images, image))
            if record.arriving:
                _receive_last(vms, record, reader.header, fill)
            else:
                _receive_changes(vms, record, reader.header, fill)


Fill = Callable[[Receiver], None]
"""Has a receiver take all that comes."""


def _receive_new(vms: Vms, vm: str, image: str, header: Header, fill: Fill) -> None:
    size = min(section.size for section in starts(header))

    def make(stack: ImageRecord) -> creating.Made:
        _check_image(header, stack)
        creating.new_disk(vms, vm, stack, size)
        receiver = Receiver(vms, vm, header, None)
        fill(receiver)
        return creating.Made(vms.vmdisks.open(vm), tuple(receiver.taken), receiver.current)

    creating.receive(vms, vm, image, size, _names(header), make)


def _receive_changes(vms: Vms, record: VmRecord, header: Header, fill: Fill) -> None:
    vm, base = record.name, _check_fits(vms, record, header)

    def act(record: VmRecord) -> None:
        receiver = Receiver(vms, vm, header, base)
        fill(receiver)
        vms.follow(record)
        size = vms.vmdisks.open(vm).size
        vms.settle(record, size=size, snapshots=(*record.snapshots, *receiver.taken), current=receiver.current)
        vms.step("receive:done")

    vms.run(record.begin(RECEIVE, base=base.name, snapshots=[*_names(header)]), act)


def _receive_last(vms: Vms, record: VmRecord, header: Header, fill: Fill) -> None:
    """What a VM that arrives wrote last. Its QEMU knows the disk's files already, so these stay.

    Cut off at any point, the same stream, or a later one since the same point, makes it right.
    """
    base = _base(record, header)
    if any(section.name is not None or section.size != record.size for section in header.sections):
        raise Conflict(f"vm {record.name!r} is arriving: its disk gets no snapshots and no other size now")
    vms.settle(record, whole=False)
    fill(Receiver(vms, record.name, header, base, own=True))
    vms.settle(record, whole=True)


def _check_fits(vms: Vms, record: VmRecord, header: Header) -> Snapshot:
    """The snapshot that the stream continues. Raises Conflict, VmRuns, VmSaved, BadRequest, DriverError."""
    base = _base(record, header)
    present = {snapshot.id for snapshot in record.snapshots} | {snapshot.name for snapshot in record.snapshots}
    again = [section.name for section in header.sections if {section.id, section.name} & present]
    if again:
        raise Conflict(f"vm {record.name!r} has a snapshot {again[0]!r} already, and the stream has one, too")
    vms.require_off(record, "it receives anything")
    there = (record.current, record.size) == (base.name, base.size)
    if not there or vms.vmdisks.changes(record.name, None, base.name):
        raise Conflict(
            f"the disk of vm {record.name!r} has changed since snapshot {base.name!r}, which the stream continues;"
            f" 'virtman snapshot revert {record.name} {base.name}' gives that up"
        )
    return base


def _unreceive(vms: Vms, record: VmRecord, _error: Exception | None) -> VmRecord:
    """Go back to the snapshot that the stream continued."""
    vms.require_off(record, "what it has received is taken back")
    base = record.argument("base")
    disk = vms.vmdisks.revert(record.name, base)
    vms.step("receive:reverted")
    for name in reversed(record.argument("snapshots")):
        vms.vmdisks.drop(record.name, name, None)
    vms.follow(record)
    return record.settled(size=disk.size, current=base)


KINDS = {RECEIVE: Kind(undo=_unreceive)}


def _base(record: VmRecord, header: Header) -> Snapshot:
    """The snapshot that a stream continues. Raises Conflict."""
    base = next(
        (snapshot for snapshot in record.snapshots if snapshot.id == header.since and not snapshot.temporary), None
    )
    if base is None:
        raise Conflict(f"vm {record.name!r} has no snapshot that the stream continues; send it the whole VM")
    return base


def _names(header: Header) -> list[str]:
    return [section.name for section in header.sections if section.name is not None]


def _check_image(header: Header, stack: ImageRecord) -> None:
    if stack.image.digest != header.image:
        raise Conflict(
            f"the stream is of another image than {stack.name!r}: of {header.image}, and that is {stack.image.digest}"
        )
