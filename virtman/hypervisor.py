"""What the agent needs of a hypervisor: to run VMs, and to move them to other hosts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from drivers.base import Device, Monitor
from virtman.models import MigrationSource
from virtman.records import Boot
from virtman.seed import Identity

NO_DISKS: Mapping[str, Device] = {}


class Running(Monitor, Protocol):
    """A VM while the hypervisor has a process for it: it runs, or is paused, say."""

    @property
    def state(self) -> str:
        """What the hypervisor calls its state: ``running``, ``paused`` and so on. Raises HypervisorError."""

    def freeze(self) -> bool:
        """Have the guest write its file systems down and hold them still; False if no agent in it does so.

        Raises HypervisorError: it may be held still.
        """

    def thaw(self) -> None:
        """Let the guest go on; a guest that is not frozen, or has no agent, is left alone.

        Raises HypervisorError: it may be held still.
        """

    def go_on(self) -> None:
        """Let a VM that is paused run. Raises HypervisorError."""

    def plug(self, name: str, disk: Device) -> None:
        """Let the VM use another disk; a disk that the VM has is left alone. Raises HypervisorError, DriverError."""

    def unplug(self, name: str, disk: Device) -> None:
        """Take such a disk away from the VM without asking the guest; a disk that the VM does not have is fine.

        Raises HypervisorError, DriverError.
        """


class Machines(Protocol):
    """What VMs need of the hypervisor."""

    def start(self, identity: Identity, disk: Device, boot: Boot, disks: Mapping[str, Device] = NO_DISKS) -> None:
        """Define and start the VM. A running one is left alone; without SSH keys it keeps the seed that it has.

        A VM whose memory is saved goes on with that memory, and with the machine that it had then.
        ``identity``: a VM that the hypervisor has keeps the UUID that it has.
        ``disks``: those that it uses besides its own, by name.
        Raises HypervisorError, HypervisorAbsent (nothing was asked of it), DomainForeign, BadRequest; VmRuns if it
        runs with another machine than ``boot``, or with other keys or user data than those that are given.
        """

    def machine(self, vm: str) -> Boot | None:
        """The machine of the VM of this name that is ours, if the hypervisor has one. Raises HypervisorError."""

    def running_vm(self, vm: str) -> AbstractContextManager[Running | None]:
        """The VM of this name that is ours, if it runs. Raises HypervisorError, VmSaved."""

    def stop(self, vm: str, *, force: bool) -> None:
        """Shut the VM down, or with ``force`` cut its power, whatever is asked of it at this moment.

        A stopped one is left alone. Saved memory is as good as that of a running VM: ``force`` throws it away.
        Raises HypervisorError, UnknownVm if the hypervisor does not have it, VmSaved.
        """

    def follow(self, vm: str, disk: Device, disks: Mapping[str, Device] = NO_DISKS) -> None:
        """Have the VM begin with these disks when others than the agent start it again. Raises HypervisorError."""

    def rename(self, vm: str, new: str) -> None:
        """Have the VM, which is off, under another name, its UUID being the same; ``follow`` is to come next.

        What has the new name already is left alone. Raises HypervisorError, DomainForeign, VmRuns, VmSaved.
        """

    def migration_source(self, vm: str) -> MigrationSource:
        """What goes along with the VM's disk. Raises HypervisorError, UnknownVm, HostTrouble."""

    def check(self, migration_source: MigrationSource) -> None:
        """Whether a VM can come. Raises HypervisorError, NotSupported."""

    def expect(self, vm: str, disk: Device, migration_source: MigrationSource) -> str:
        """Make ready for a VM that comes: keep its seed, and let QEMU open its disk.

        Returns its domain (XML). Raises HypervisorError, DomainForeign, HostTrouble.
        """

    def migrate(self, vm: str, uri: str, domain: str, tell: Callable[[int, int], None]) -> float:
        """Move the VM's memory to the libvirt at ``uri``, where it is paused then. Returns seconds that it stood still.

        ``tell`` hears of bytes moved, and in all; what it raises ends the move. Raises HypervisorError: it goes on
        here, if libvirt says so.
        """

    def went(self, vm: str) -> bool | None:
        """Whether the VM does not run here because its memory was moved; None if that is not known any more.

        Raises HypervisorError.
        """

    def end_migration(self, vm: str) -> None:
        """Have what ``migrate`` does end, with an error; with nothing to end it is fine. Raises HypervisorError."""

    def undefine(self, vm: str) -> None:
        """Forget a VM that is off, and keep its files. Raises HypervisorError."""

    def remove(self, vm: str) -> None:
        """Stop the VM, and forget it with all that was made for it, saved memory too. Nothing there is fine.

        Raises HypervisorError.
        """
