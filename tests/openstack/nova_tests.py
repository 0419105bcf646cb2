"""Nova's own tests that are run with the patch in. NAME:WORD|WORD: those of NAME that have a word in their own name."""

from __future__ import annotations

EVERY_RUN = ("nova.tests.unit.virt.test_block_device nova.tests.functional.test_boot_from_volume",)
"""With ``make test``: what is nearest to what the patch changes, in one process, as it takes long to import Nova."""

WITH_OPTIONS_ON = (
    "nova.tests.functional.test_boot_from_volume nova.tests.functional.test_multiattach",
    "nova.tests.unit.conductor.test_conductor:bdm|block_dev|boot|shelve|rebuild",
    "nova.tests.unit.api.openstack.compute.test_servers:volume|bdm|block_dev|boot|mult|count",
)
"""With ``make test-whole``, once more with both options on: those that take Nova as it is, and no volume for a base."""

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
"""With ``make test-whole``."""

KNOWN: dict[str, str] = {}
"""Tests that fail here without the patch as well, each with the reason. No others may fail."""
