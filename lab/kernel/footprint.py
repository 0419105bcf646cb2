"""What the layers of a kernel stack leave on a host: compared before and after, it shows what leaks."""

from __future__ import annotations

from lab.kernel.machine import Machine

_LISTINGS = {
    # Asked of what is there only: to ask would load the modules that an agent has to load by itself.
    "maps": "test ! -d /sys/module/dm_mod || dmsetup ls | grep -v '^No devices found' || true",
    "loop devices": "losetup --list --noheadings --output NAME,BACK-FILE",
    "iSCSI sessions": "iscsiadm --mode session || test $? = 21",  # iscsiadm(8): 21, no records found
    "iSCSI records": "iscsiadm --mode node || test $? = 21",
    # discovery_auth comes with the first target of a boot and stays; alua comes with the module.
    "targets": "test ! -d /sys/kernel/config/target || find /sys/kernel/config/target -mindepth 2 -maxdepth 4 -type d"
    " ! -path '*/discovery_auth*' ! -path '*/alua*'",
    "bcache sets": "test ! -d /sys/fs/bcache || find /sys/fs/bcache -mindepth 1 -maxdepth 1 -type d",
    "disks": "ls /sys/block | grep -v '^loop'",  # unused loop devices stay
}


_HEAD = "== "


def footprint(machine: Machine) -> dict[str, list[str]]:
    """Sorted lines of each kind of thing that a stack can leave on a guest. Raises CommandFailed."""
    listings = (f"echo '{_HEAD}{kind}'; {{ {listing}; }} || exit" for kind, listing in _LISTINGS.items())
    # One command for all: each takes a good part of a second under emulation.
    said = machine.run(["sh", "-c", "; ".join(["udevadm settle", *listings])])
    found: dict[str, list[str]] = {}
    for part in said.split(_HEAD)[1:]:
        kind, *lines = part.splitlines()
        found[kind] = sorted(lines)
    return found
