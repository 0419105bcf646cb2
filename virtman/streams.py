"""What VMs' disks hold besides their images goes to other hosts and comes from them as a stream that a caller carries.

The stream is docs/stream.md's. To receive one is an operation of the VM's record that is undone if it does not end.

All snapshots of a stream are held before the first byte goes, and their IDs are read once more: a snapshot that was
deleted and taken anew is another one under the same name. The caller may go silent at any time, while the call holds
the VM's lock. So destroying the VM ends its stream first, and repair does not wait for locks that calls hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from drivers.base import Device, Range
from drivers.blocks import Blocks
from virtman import creating, disks, models
from virtman.convert import Progress
from virtman.copies import Copies
from virtman.errors import BadRequest, BadStream, StreamMisfit
from virtman.hostfiles import translate_os_errors
from virtman.operations import Kind
from virtman.pipe import Caller
from virtman.receiving import Receiver, starts
from virtman.records import RECEIVE, ImageRecord, Snapshot, VmRecord
from virtman.roles import Permit, anything
from virtman.stream import MOST_DATA, Begin, Data, End, Header, Piece, Reader, Section, Writer, Zeros
from virtman.vms import Vms

SEND, RECEIVED = "send", "receive"
"""Steps of progress."""

_NOTHING = bytes(MOST_DATA)
_TOLD = 4 << 20
"""Bytes after which progress is told."""


@dataclass(frozen=True)
class _Part:
    """A section, what its snapshot keeps, which stays as long as the part is read, and where that differs from the
    parent's.
    """

    section: Section
    device: Device
    ranges: list[Range]


# Sending


def send(
    vms: Vms, copies: Copies, vm: str, snapshot: str | None, since: str | None, write: Callable[[bytes], None],
    progress: Progress, *, with_snapshots: bool = False,
) -> models.Sent:  # fmt: skip
    """Write the stream of a snapshot, or of what the disk holds now; of what changed ``since`` another snapshot.

    ``with_snapshots``: also those before it, after ``since``; of the disk as it is now all that there are. Raises
    UnknownVm, UnknownSnapshot, BadRequest, DriverError, HostTrouble, as ``disks.take``, and as ``write``.
    """
    with copies.in_use(vms.record(vm).image), ExitStack() as stack:
        if snapshot is None:
            last = stack.enter_context(disks.temporary(vms, vm, went=True))
        else:
            last = disks.require(vms.record(vm), snapshot)
        record = vms.record(vm)
        base = None if since is None else disks.require(record, since)
        snapshots = _chosen(record, last, base) if with_snapshots else _alone(record, last, base)
        # All at once: later another snapshot may have the name of one of these.
        devices = [stack.enter_context(vms.vmdisks.reading(vm, snapshot.name)) for snapshot in snapshots]
        parts = [
            _part(vms, record, snapshot, base, snapshots, device)
            for snapshot, device in zip(snapshots, devices, strict=True)
        ]
        _check_stayed(vms.record(vm), snapshots if base is None else [base, *snapshots])
        ranges = [changed for part in parts for changed in part.ranges]
        header = Header(
            image=vms.images.ensure(record.image).image.digest,
            since=None if base is None else base.id,
            sections=tuple(part.section for part in parts),
            total=sum(changed.length for changed in ranges),
            data=sum(changed.length for changed in ranges if not changed.zeros),
        )
        _write(vms, vm, header, parts, write, progress)
        kept = sum(part.section.name is not None for part in parts)
        return models.Sent(total=header.total, snapshots=kept, state=last.state)


def _part(
    vms: Vms, record: VmRecord, snapshot: Snapshot, base: Snapshot | None, snapshots: Sequence[Snapshot], device: Device
) -> _Part:  # fmt: skip
    """``snapshots``: all that are sent. What is not over one of these is over the base."""
    parent = next((one for one in snapshots if one.name == snapshot.parent), base)
    section = Section(
        id=snapshot.id, name=None if snapshot.temporary else snapshot.name,
        parent=None if parent is None else parent.id, size=snapshot.size, taken=snapshot.taken, state=snapshot.state,
    )  # fmt: skip
    since = None if parent is None else parent.name
    return _Part(section, device, vms.vmdisks.changes(record.name, snapshot.name, since))


def _check_stayed(record: VmRecord, snapshots: Sequence[Snapshot]) -> None:
    """The driver was asked by names. Raises BadRequest if one of them may have been another snapshot's."""
    present = {snapshot.id for snapshot in record.snapshots}
    gone = next((snapshot.name for snapshot in snapshots if snapshot.id not in present), None)
    if gone is not None:
        raise BadRequest(f"snapshot {gone!r} of vm {record.name!r} was deleted while it was to be sent; send it again")


def _write(
    vms: Vms, vm: str, header: Header, parts: Sequence[_Part], write: Callable[[bytes], None], progress: Progress
) -> None:  # fmt: skip
    writer, arrived = Writer(), _counted(SEND, header, progress)
    write(writer.bytes(header))
    for number, part in enumerate(parts):
        write(writer.bytes(Begin(number)))
        with vms.open_blocks(vm, part.device) as blocks:
            for piece in pieces(blocks, part.ranges):
                write(writer.bytes(piece))
                arrived(piece.end - piece.offset)
        vms.step("send:section")
    write(writer.bytes(End()))


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

    Raises BadStream, NewerStream, StreamMisfit, VmExists, VmRuns, UnknownVm, UnknownImage, Forbidden, BadRequest,
    DriverError, NoRoom, HostTrouble, and as ``chunks``; after an error all is as it was before.
    """
    incoming = _read(chunks)
    header = next(incoming)
    if not isinstance(header, Header):
        raise BadStream("the stream does not begin with its header")
    arrived = _counted(RECEIVED, header, progress)
    if header.since is None:
        _receive_new(vms, vm, image, header, incoming, arrived)
    else:
        _receive_changes(vms, vm, image, header, incoming, arrived, permit)


def _receive_new(
    vms: Vms, vm: str, image: str, header: Header, incoming: Iterator[Piece], arrived: Callable[[int], None]
) -> None:  # fmt: skip
    def fill(stack: ImageRecord, make: Callable[[], object]) -> creating.Made:
        _check_image(header, stack)
        make()
        receiver = _receiver(vms, vm, header, None)
        current = receiver.fill(incoming, arrived)
        return creating.Made(vms.vmdisks.open(vm), tuple(receiver.taken), current)

    size = min(section.size for section in starts(header))
    creating.receive(vms, vm, image, size, _names(header), fill)


def _receive_changes(
    vms: Vms, vm: str, image: str, header: Header, incoming: Iterator[Piece], arrived: Callable[[int], None],
    permit: Permit,
) -> None:  # fmt: skip
    with vms.changing(vm, permit, arriving=True) as record:
        if record.image != image:
            raise StreamMisfit(f"vm {vm!r} is of image {record.image!r}, not {image!r}")
        _check_image(header, vms.images.ensure(image))
        if record.arriving:
            _receive_last(vms, record, header, incoming, arrived)
            return
        base = _check_fits(vms, record, header)

        def act(record: VmRecord) -> None:
            receiver = _receiver(vms, vm, header, base)
            current = receiver.fill(incoming, arrived)
            vms.follow(record)
            size = vms.vmdisks.open(vm).size
            vms.settle(record, size=size, snapshots=(*record.snapshots, *receiver.taken), current=current)
            vms.step("receive:done")

        vms.run(record.begin(RECEIVE, base=base.name, snapshots=[*_names(header)]), act)


def _receive_last(
    vms: Vms, record: VmRecord, header: Header, incoming: Iterator[Piece], arrived: Callable[[int], None]
) -> None:  # fmt: skip
    """What a VM that arrives wrote last. Its QEMU knows the disk's files already, so these stay.

    Cut off at any point, the same stream, or a later one since the same point, makes it right.
    """
    base = _base(record, header)
    if any(section.name is not None or section.size != record.size for section in header.sections):
        raise StreamMisfit(f"vm {record.name!r} is arriving: its disk gets no snapshots and no other size now")
    vms.settle(record, whole=False)
    _receiver(vms, record.name, header, base, own=True).fill(incoming, arrived)
    vms.settle(record, whole=True)


def _receiver(vms: Vms, vm: str, header: Header, base: Snapshot | None, *, own: bool = False) -> Receiver:
    return Receiver(vm, header, base, vms.vmdisks, vms.open_blocks, vms.step, own=own)


def _check_fits(vms: Vms, record: VmRecord, header: Header) -> Snapshot:
    """The snapshot that the stream continues. Raises StreamMisfit, VmRuns, VmSaved, BadRequest, DriverError."""
    base = _base(record, header)
    present = {snapshot.id for snapshot in record.snapshots} | {snapshot.name for snapshot in record.snapshots}
    again = [section.name for section in header.sections if {section.id, section.name} & present]
    if again:
        raise StreamMisfit(f"vm {record.name!r} has a snapshot {again[0]!r} already, and the stream has one, too")
    vms.require_off(record, "it receives anything")
    there = (record.current, record.size) == (base.name, base.size)
    if not there or vms.vmdisks.changes(record.name, None, base.name):
        raise StreamMisfit(
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
    """The snapshot that a stream continues. Raises StreamMisfit."""
    base = next(
        (snapshot for snapshot in record.snapshots if snapshot.id == header.since and not snapshot.temporary), None
    )
    if base is None:
        raise StreamMisfit(f"vm {record.name!r} has no snapshot that the stream continues; send it the whole VM")
    return base


def _names(header: Header) -> list[str]:
    """The snapshots that a stream has."""
    return [section.name for section in header.sections if section.name is not None]


def _counted(step: str, header: Header, progress: Progress) -> Callable[[int], None]:
    """What is called with the bytes of each piece, and tells of the sum from time to time."""
    done = said = 0

    def count(length: int) -> None:
        nonlocal done, said
        done += length
        if done - said >= _TOLD or done == header.total:
            said = done
            progress(step, done, header.total)

    return count


def pieces(blocks: Blocks, ranges: Iterable[Range]) -> Iterator[Data | Zeros]:
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


def _read(chunks: Iterable[bytes]) -> Iterator[Piece]:
    reader = Reader()
    for chunk in chunks:
        yield from reader.feed(chunk)
    reader.finish()


def _check_image(header: Header, stack: ImageRecord) -> None:
    if stack.image.digest != header.image:
        raise StreamMisfit(
            f"the stream is of another image than {stack.name!r}: of {header.image}, and that is {stack.image.digest}"
        )


def _chosen(record: VmRecord, last: Snapshot, base: Snapshot | None) -> list[Snapshot]:
    """``last`` with the snapshots before it and after the base; all snapshots if it is the disk of now, and there is no
    base.

    Raises BadRequest.
    """
    if base is None and last.temporary:
        return [snapshot for snapshot in record.snapshots if not snapshot.temporary] + [last]
    line = record.line(last)
    return line[_place(line, last, base) :]


def _alone(record: VmRecord, last: Snapshot, base: Snapshot | None) -> list[Snapshot]:
    _place(record.line(last), last, base)
    return [last]


def _place(line: Sequence[Snapshot], last: Snapshot, base: Snapshot | None) -> int:
    """Where the snapshots after the base begin. Raises BadRequest."""
    if base is None:
        return 0
    if base not in line[:-1]:
        what = "what the disk holds now" if last.temporary else f"snapshot {last.name!r}"
        before = ", ".join(snapshot.name for snapshot in line[:-1]) or "none"
        raise BadRequest(f"{what} did not go on from snapshot {base.name!r}; these came before it: {before}")
    return line.index(base) + 1
