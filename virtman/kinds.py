"""Every kind of operation of a VM, by name."""

from __future__ import annotations

from collections.abc import Mapping

from virtman import attaching, booting, creating, disks, migration, renaming, streams
from virtman.operations import Kind
from virtman.records import VmRecord
from virtman.vms import Vms

VM_KINDS: Mapping[str, Kind[Vms, VmRecord]] = {
    **creating.KINDS,
    **booting.KINDS,
    **disks.KINDS,
    **attaching.KINDS,
    **renaming.KINDS,
    **migration.KINDS,
    **streams.KINDS,
}
