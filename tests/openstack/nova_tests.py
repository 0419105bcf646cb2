"""Nova's own tests that are run with the patch in. NAME:PATTERN: those of NAME that have PATTERN in their own name."""

from __future__ import annotations

DISKS = "volume|bdm|block_dev|boot"
CHOSEN = {
    "nova/compute/manager.py": (
        f"nova.tests.unit.compute.test_compute_mgr:{DISKS}|rebuild|delete|build|shelve|cleanup|resize"
        f" nova.tests.unit.compute.test_compute:{DISKS}|shelve|backup"
    ),
    "nova/virt/libvirt/driver.py": (
        f"nova.tests.unit.virt.libvirt.test_driver:{DISKS}|snapshot|cleanup|destroy|check_can_live|migrate_disk"
        " nova.tests.unit.virt.libvirt.volume"
    ),
    "functional": "nova.tests.functional.test_boot_from_volume nova.tests.functional.test_multiattach",
    "nova/compute/api.py": (
        f"nova.tests.unit.compute.test_api:{DISKS}|rebuild|shelve|backup|multiple|create"
        " nova.tests.unit.virt.test_block_device nova.tests.unit.volume.test_cinder"
    ),
    "nova/api/openstack/compute/servers.py": f"nova.tests.unit.api.openstack.compute.test_servers:{DISKS}|mult|count",
    "nova/conductor/manager.py": f"nova.tests.unit.conductor.test_conductor:{DISKS}|shelve|rebuild",
    "nova/conf/__init__.py": "nova.tests.unit.conf nova.tests.unit.test_conf",
}
"""With every run, by the file that the patch changes: those of its tests that may come to what is changed; all would
take many minutes."""


def together() -> list[str]:
    """The chosen ones: unit tests in one process, as it takes long to import Nova, and functional tests in another."""
    units = [names for file, names in CHOSEN.items() if file != "functional"]
    return [" ".join(units), CHOSEN["functional"]]


SETTINGS = ("virtman.use_vmtsnapshot=true", "virtman.use_cachegroup=true")
SET = (
    "nova.tests.functional.test_boot_from_volume nova.tests.functional.test_multiattach",
    "nova.tests.unit.conductor.test_conductor:bdm|block_dev|boot|shelve|rebuild",
    f"nova.tests.unit.api.openstack.compute.test_servers:{DISKS}|mult|count",
)
"""With every run, once more with both options on: those that take Nova as it is, and no volume for a base."""

WHOLE = (
    "nova.tests.unit.virt.libvirt",
    "nova.tests.unit.compute",
    "nova.tests.unit.conductor",
    "nova.tests.unit.api.openstack.compute",
    "nova.tests.functional.libvirt",
    "nova.tests.functional.compute",
    "nova.tests.functional.test_servers",
    "nova.tests.functional.test_boot_from_volume",
    "nova.tests.functional.test_cold_migrate",
    "nova.tests.functional.test_multiattach",
    "nova.tests.functional.test_server_rescue",
    "nova.tests.unit.virt.test_block_device",
    "nova.tests.unit.virt.test_virt_drivers",
    "nova.tests.unit.volume",
    "nova.tests.unit.conf",
    "nova.tests.unit.test_conf",
)
"""With --all, or WHOLE set, instead."""

KNOWN: dict[str, str] = {}
"""Tests that fail here without the patch as well, each with the reason. No others may fail."""
