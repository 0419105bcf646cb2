"""The root of the lab's guests: Debian's kernel and the tools of the kernel stack, as an ext4 image without partitions.

It is built once from the machine's own package sources and kept under a hash of everything that makes it. The project
itself is not in it: guests get it when they start.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from lab import guest
from lab.sources import codename
from lab.tools import BUILD, CHECKOUT, run

LAID_OVER = guest.LAB / "kernel-root"
IMAGE_BYTES = 4 << 30

PACKAGES = (
    "bcache-tools",
    "busybox-static",
    "dbus",
    "dmsetup",
    "e2fsprogs",
    "fio",
    "iproute2",
    "kmod",
    "libvirt-clients",
    "libvirt-daemon-system",
    "linux-image-cloud-amd64",
    "login",
    "mount",
    "multipath-tools",
    "open-iscsi",
    "openssh-server",
    "passwd",
    "procps",
    "python3",
    "python3-rtslib-fb",
    "qemu-system-common",
    "qemu-system-x86",
    "qemu-utils",
    "systemd-sysv",
    "targetcli-fb",
    "thin-provisioning-tools",
    "tiny-initramfs",  # as in lab.guest
    "udev",
)

# The lab starts what it tests; the others cost time under emulation.
MASKED = (
    *guest.MASKED,
    "apt-daily-upgrade.timer",
    "apt-daily.timer",
    "bcache.service",
    "blk-availability.service",
    "libvirt-guests.service",
    "libvirtd-ro.socket",
    "libvirtd-admin.socket",
    "lvm2-monitor.service",
    "ssh.socket",
    "systemd-timesyncd.service",
    "virtlockd-admin.socket",
)
# A kernel stack needs its own filesystem of settings (LIO) and the units that make devices and their nodes.
NEEDED = ("sys-kernel-config.mount", "kmod-static-nodes.service", "systemd-tmpfiles-setup-dev.service",
          "systemd-tmpfiles-setup.service", "systemd-sysctl.service", "systemd-sysusers.service")  # fmt: skip


@dataclass(frozen=True)
class Root:
    """The image (raw, sparse, ext4) with the kernel and initrd to boot it."""

    image: Path
    kernel: Path
    initrd: Path


def root(cache: Path = BUILD / "kernel-root") -> Root:
    """The root, built now if it is not in the cache."""
    home = guest.kept(cache, recipe_hash(codename()), "the root of the kernel lab (two minutes, once)", build)
    return Root(home / "root.img", home / "vmlinuz", home / "initrd.img")


def recipe_hash(suite: str) -> str:
    """Names a root by all that makes it."""
    digest = hashlib.sha256(f"{suite}\0{sys.version_info[:2]}".encode())
    files = [*guest.files_below(LAID_OVER), *guest.files_below(guest.LAB / "guest-initramfs")]
    for path in sorted([Path(__file__), Path(guest.__file__), CHECKOUT / "setup.py", *files]):
        digest.update(f"\0{path.relative_to(CHECKOUT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def build(work: Path, made: Path) -> None:
    """Make the files of a Root in ``made``."""
    tree = work / "root"
    guest.install_packages(tree, work / "debian.sources", PACKAGES)
    install_python(tree)
    guest.configure(tree, LAID_OVER, [unit for unit in MASKED if unit not in NEEDED], ["lab-setup.service"])
    (tree / "etc/systemd/system/multi-user.target.wants/libvirtd.service").unlink()  # its socket starts it
    guest.make_initrd(tree)
    shutil.copy(tree / "boot/vmlinuz", made / "vmlinuz")
    shutil.copy(tree / "boot/initrd.img", made / "initrd.img")
    image = made / "root.img"
    with image.open("wb") as file:
        os.truncate(file.fileno(), IMAGE_BYTES)
    run(["mke2fs", "-q", "-t", "ext4", "-L", guest.ROOT_LABEL, "-d", tree, image])


def install_python(tree: Path) -> None:
    """What the project and its tests import, for the guest's Python: it is of the same release as this machine's."""
    target = tree / f"usr/local/lib/python{sys.version_info.major}.{sys.version_info.minor}/dist-packages"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-warn-script-location",
    ]
    run([*pip, "--target", target, f"{CHECKOUT}[test]"])
    for ours in ("virtman", "volt", "drivers"):
        shutil.rmtree(target / ours)
