"""Makes a host be what its records say, whatever a crash, a reboot or an administrator left."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from drivers.errors import DriverError
from virtman import disks
from virtman.devices import Devices
from virtman.errors import OriginChanged, OriginMissing, RepairIncomplete, VirtmanError
from virtman.stacks import Stacks
from virtman.vms import Vms

log = logging.getLogger(__name__)

AT_ONCE = 16


def repair(stacks: Stacks, vms: Vms, devices: Devices) -> dict[str, list[str]]:
    """Finish or undo what was cut off, serve what is not served, and remove layers that have no record.

    A VM that a call is under way with is left alone: nothing was cut off, and the call may last for hours.
    Returns the names of the VMs, images, devices and strays that something was done for. Raises RepairIncomplete with
    every error.
    """
    repaired: list[str] = []

    def repair_vm(name: str) -> None:
        repaired.extend([name] if disks.repair(vms, name) else [])

    # First, and for themselves: they need no stack, and VMs read and write them.
    cut_off, failed = repair_devices(devices)
    failed += side_by_side(
        [partial(repair_vm, vm.name) for vm in vms.shelf.all() if vm.operation is not None or disks.leftovers(vms, vm)]
    )

    def restore(image: str) -> None:
        # What is wrong with what is served in place cannot be repaired here; upkeep looks again, and tells.
        with contextlib.suppress(OriginChanged, OriginMissing):
            stacks.restore(image)

    images = stacks.records()
    missing = [record.name for record in images if not record.steady or not stacks.serving(record.name)]
    strays = sorted(stacks.strays())
    removals = [partial(stacks.remove_stray, stray) for stray in strays]
    in_place = {record.name for record in images if record.in_place is not None}

    def reopen_vms(wanted: Callable[[str], bool]) -> list[Exception]:
        # After a reboot, a disk is usable again once the stack below it is there.
        return side_by_side([partial(_reopen, vms, vm.name) for vm in vms.shelf.all() if wanted(vm.image)])

    def bring_back(image: str) -> None:
        failed.extend([*side_by_side([partial(restore, image)]), *reopen_vms(lambda other: other == image)])

    failed += side_by_side([*[partial(restore, each.name) for each in images if each.name not in in_place], *removals])
    failed += reopen_vms(lambda image: image not in in_place)
    # What is served in place comes last, each for itself: its storage may not answer, and nobody else waits for that.
    failed += side_by_side([partial(bring_back, name) for name in sorted(in_place)], at_once=len(in_place) or 1)
    raise_all(failed)
    images_back = [name for name in missing if name not in stacks.flaws]
    return {"vms": sorted(repaired), "images": images_back, "strays": strays, "devices": cut_off}


def _reopen(vms: Vms, name: str) -> None:
    """Make a ready disk usable, if it is not any more after a reboot. A call that is under way opens it itself."""
    with vms.holding_if_free(name) as free:
        record = vms.shelf.get(name)
        if free and record is not None and record.steady:
            vms.snapshots.open(name)


def repair_devices(devices: Devices) -> tuple[list[str], list[Exception]]:
    """Finish or undo what was cut off, remove what has no record, and look after those that are attached.

    Returns the paths of those that something was done for, and what was raised.
    """
    repaired: list[str] = []

    def repair_one(name: str, path: str) -> None:
        repaired.extend([path] if devices.repair_if_free(name) else [])
        try:
            devices.tend(name)
        except (VirtmanError, DriverError) as error:  # tried again with each heartbeat, which tells of it
            log.warning("device %s: %s", path, error)

    failed = side_by_side(
        [
            *(partial(repair_one, record.name, record.device) for record in devices.records()),
            *(partial(devices.remove_stray, name) for name in sorted(devices.strays())),
        ]
    )
    return sorted(repaired), failed


def side_by_side(acts: Sequence[Callable[[], None]], at_once: int = AT_ONCE) -> list[Exception]:
    """Do all acts, whatever fails. Returns what was raised."""
    failed: list[Exception] = []
    with ThreadPoolExecutor(at_once, thread_name_prefix="repair") as pool:
        errors = [future.exception() for future in [pool.submit(act) for act in acts]]
    for error in errors:
        if isinstance(error, Exception):
            log.error("%s", error)
            failed.append(error)
        elif error is not None:
            raise error
    return failed


def raise_all(failed: Sequence[Exception]) -> None:
    """Raise RepairIncomplete with every error, if there is one."""
    if failed:
        raise RepairIncomplete("; ".join(str(error) for error in failed))
