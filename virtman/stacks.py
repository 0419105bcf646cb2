"""The stacks of this host, one for each image: their records and locks, and what every operation on a stack needs.

The operations have modules of their own: ``hosting`` attaches and removes, ``origins`` publishes, ``serving`` builds
the layers, ``following`` keeps a stack at its place in Volt's tree, ``reading`` computes digests of images in place.

A stack's record is written before the first layer is made, and removed after the last layer is gone. Everything is
idempotent, so that repair is the same code as the first attempt. Each operation holds the lock of its image, so only
operations on the same image wait for each other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from drivers.base import ImageSource
from drivers.errors import DriverError
from drivers.host.locks import NamedLocks
from virtman.errors import Suspended
from virtman.imagestore import ImageStore
from virtman.operations import Kind, Operations
from virtman.reading import Readers
from virtman.records import ImageRecord, RecordStore, Role, VmRecord
from virtman.steps import Step, log_step
from virtman.voltlink import VoltLink

log = logging.getLogger(__name__)


class Stacks:
    """``source`` serves the images, ``store`` has the published copies, ``vms`` has the records of VMs.

    ``changed`` is called when Volt should hear of a change soon; ``released`` with the name of an image when an
    operation on the image has ended, or a copying of the image, or a VM of the image is gone.
    """

    def __init__(
        self, source: ImageSource, records: RecordStore[ImageRecord], vms: RecordStore[VmRecord], store: ImageStore,
        volt: VoltLink, kinds: Mapping[str, Kind[Stacks, ImageRecord]], changed: Callable[[], None],
        released: Callable[[str], None], step: Step = log_step,
    ) -> None:  # fmt: skip
        self.source, self.records, self.store, self.volt = source, records, store, volt
        self.changed, self.released, self.step = changed, released, step
        self.locks = NamedLocks(released)
        self.operations: Operations[Stacks, ImageRecord] = Operations("image", records, kinds, self, step)
        self.readers = Readers()
        self.marks: dict[str, str] = {}
        """What each image in place was served from when the image was opened last (``Opened.mark``)."""
        self.suspended = False
        """No stack is built or inspected until the next agent starts."""
        self._vms = vms
        self._kept: list[str] = []

    @contextmanager
    def holding(self, name: str) -> Iterator[ImageRecord | None]:
        """Hold the lock of an image. Gives the record, if there is one. Raises StateDamaged."""
        with self.locks.hold(name):
            yield self.records.get(name)

    @contextmanager
    def keeping(self, name: str) -> Iterator[None]:
        """Keep the stack of an image meanwhile, though no VM may need the stack."""
        self._kept.append(name)
        try:
            yield
        finally:
            self._kept.remove(name)
            self.released(name)

    def in_use(self, name: str) -> bool:
        """Whether a VM of this host, ready or half made, needs the image, or a VM's unreadable record may need it."""
        vms, unreadable = self._vms.sorted_out()
        return name in self._kept or bool(unreadable) or any(vm.image == name for vm in vms)

    def needed(self, record: ImageRecord) -> bool:
        """Whether a VM of this host or a child needs the stack."""
        return bool(record.children) or self.in_use(record.name)

    def idle(self, record: ImageRecord) -> bool:
        """Whether the stack may be removed: it is not needed, and this host is not to keep all of the image."""
        return record.role is Role.HOST and not record.hydrate and not self.needed(record)

    def check_not_suspended(self) -> None:
        """Raises Suspended."""
        if self.suspended:
            raise Suspended("this host is suspended; start its agent again first")

    def held(self) -> frozenset[str]:
        """Images in place whose file or device the agent or a driver may have open."""
        names = frozenset(record.name for record in self.records.all() if record.in_place is not None)
        try:
            return names & (self.source.existing() | self.readers.names()) if names else names
        except DriverError as error:
            log.warning("cannot list what is served: %s", error)
            return names

    def orphans(self) -> frozenset[str]:
        """Images with layers on the host and no record."""
        return self.source.existing() - frozenset(self.records.names())
