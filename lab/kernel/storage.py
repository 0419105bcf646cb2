"""A guest that plays the storage of a cloud: it has one volume, which hosts reach by iSCSI."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lab.kernel.machine import Machine

TARGET, PORT, LUN = "iqn.2026-01.com.example:storage", 3260, 1
FILE = "/var/tmp/volume.img"
_DISK_LIMIT = 60
"""Seconds from a login until the disk is there."""
_PROGRAM = Path(__file__).with_name("storageprogram.py")


class Storage:
    """The volume of a guest, in FILE there. All calls raise CommandFailed."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def serve(self, size: int) -> None:
        """Have a volume of so many random bytes, a multiple of 1 MiB."""
        self._do("serve", str(size))

    def withdraw(self) -> None:
        """Have no volume any more; to have none is fine."""
        self._do("withdraw")

    def _do(self, act: str, *words: str) -> None:
        argv = ["python3", "-W", "ignore", "-", act, self.machine.address, FILE, *words]
        self.machine.run(argv, stdin=_PROGRAM.read_text())

    @property
    def device(self) -> Path:
        """The volume on a host that has logged in."""
        return Path(f"/dev/disk/by-path/ip-{self.machine.address}:{PORT}-iscsi-{TARGET}-lun-{LUN}")

    def log_in(self, host: Machine, settings: Mapping[str, str] | None = None) -> None:
        """Have a host log in, by a record with these settings (iscsid.conf)."""
        record = self._record()
        host.run([*record, "--op", "new"])
        for name, value in (settings or {}).items():
            host.run([*record, "--op", "update", "--name", name, "--value", value])
        host.run([*record, "--login"])
        host.run(["udevadm", "wait", f"--timeout={_DISK_LIMIT}", str(self.device)])

    def log_out(self, host: Machine) -> None:
        """Have a host end its session, if it has one, and forget the target."""
        quiet = (
            "iscsiadm --mode node --targetname {0} --logout; iscsiadm --mode node --targetname {0} --op delete; true"
        )
        host.run(["sh", "-c", quiet.format(TARGET)])

    def _record(self) -> list[str]:
        portal = f"{self.machine.address}:{PORT},1"
        return ["iscsiadm", "--mode", "node", "--targetname", TARGET, "--portal", portal]
