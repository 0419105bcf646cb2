"""Every kind of operation of a stack, and of a VM, by name. Those of devices are in devices.py."""

from __future__ import annotations

from collections.abc import Mapping

from virtman import attaching, booting, creating, disks, hosting, migration, origins, renaming, streams
from virtman.operations import Kind
from virtman.records import ImageRecord, VmRecord
from virtman.stacks import Stacks
from virtman.vms import Vms

IMAGE_KINDS: Mapping[str, Kind[Stacks, ImageRecord]] = {**hosting.KINDS, **origins.KINDS}

VM_KINDS: Mapping[str, Kind[Vms, VmRecord]] = {
    **creating.KINDS,
    **booting.KINDS,
    **disks.KINDS,
    **attaching.KINDS,
    **renaming.KINDS,
    **migration.KINDS,
    **streams.KINDS,
}
