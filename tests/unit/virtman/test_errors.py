"""The problem types of the local API."""

from __future__ import annotations

from testtools import TestCase

from virtman.errors import BY_KIND

KINDS = """
    agent-failed agent-unreachable bad-device bad-image-file bad-request bad-size bad-stream bad-volume caller-gone
    config conflict content-changed coordinator-down disk-attached disk-busy disk-changed domain-foreign driver
    file-exists forbidden host host-taken hypervisor hypervisor-absent image-exists image-in-use image-unlisted
    image-withdrawn internal interrupted never-booted no-room no-volumes not-found not-supported
    origin-changed origin-missing repair-incomplete state-damaged stream-misfit suspended too-many-calls
    unknown-image unknown-snapshot unknown-vm vm-exists vm-moving vm-runs vm-saved volt-refused
"""


class KindTest(TestCase):
    def test_clients_know_these(self) -> None:
        self.assertEqual(KINDS.split(), sorted(BY_KIND))

    def test_every_status_is_an_error_of_http(self) -> None:
        self.assertEqual([], [error for error in BY_KIND.values() if not 400 <= error.status < 600])
