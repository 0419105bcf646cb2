"""The root of the lab's guests: Debian's kernel and the tools of the kernel stack, as an ext4 image without partitions.

It is built once from the machine's own package sources and kept under a hash of everything that makes it. The project
itself is not in it: guests get it when they start.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

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
    "gcc",
    "iproute2",
    "kmod",
    "libc6-dev",
    "libvirt-clients",
    "libvirt-daemon-system",
    "libvirt-dev",
    "linux-image-cloud-amd64",
    "login",
    "lvm2",
    "mount",
    "multipath-tools",
    "nbd-client",
    "open-iscsi",
    "openssh-server",
    "openssl",
    "passwd",
    "pkg-config",
    "procps",
    "python3",
    "python3-dev",
    "python3-libvirt",
    "python3-rtslib-fb",
    "python3-venv",
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

    def python(self, folder: Path) -> list[str]:
        """What begins a command of the root's own Python, which runs on this machine in ``folder``."""
        private = ["unshare", "--mount", "--propagation", "private"]
        return [*private, str(guest.LAB / "kernel/root-python"), str(self.image), str(folder)]


def root(suite: str = "", cache: Path = BUILD / "kernel-root") -> Root:
    """The root, built now if it is not in the cache.

    ``suite``: the codename of its Debian release; this machine's unless given. Raises NoPackageSources, CommandFailed.
    """
    suite = suite or codename()
    what = f"the root of the kernel lab (two minutes, once) from Debian {suite} packages"
    home = guest.kept(cache, recipe_hash(suite), what, functools.partial(build, suite))
    return Root(home / "root.img", home / "vmlinuz", home / "initrd.img")


def recipe_hash(suite: str) -> str:
    """Names a root by all that makes it."""
    digest = hashlib.sha256(suite.encode())
    files = [*guest.files_below(LAID_OVER), *guest.files_below(guest.LAB / "guest-initramfs")]
    for path in sorted([Path(__file__), Path(guest.__file__), CHECKOUT / "setup.py", *files]):
        digest.update(f"\0{path.relative_to(CHECKOUT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def build(suite: str, work: Path, made: Path) -> None:
    """Make the files of a Root in ``made``."""
    tree = work / "root"
    guest.install_packages(tree, work / "debian.sources", PACKAGES, suite)
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
    """What the project and its tests import, for the guest's Python, which may be another one than this machine's."""
    [stdlib] = (tree / "usr/lib").glob("python3.*")
    target = tree / f"usr/local/lib/{stdlib.name}/dist-packages"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # Byte code would be that of this machine's Python.
    foreign = ["--python-version", stdlib.name.removeprefix("python"), "--only-binary=:all:", "--no-compile"]
    run([*pip, *foreign, "--target", target, *requirements()])
    run(["chroot", tree, "python3", "-m", "compileall", "-q", Path("/") / target.relative_to(tree)])


def requirements() -> list[str]:
    """What the project and its tests take of PyPI; libvirt's library has to be compiled, and so comes from Debian."""
    wanted = map(Requirement, metadata.requires("virtman") or [])
    taken = [one for one in wanted if one.marker is None or one.marker.evaluate({"extra": "test"})]
    return [f"{one.name}{one.specifier}" for one in taken if one.name != "libvirt-python"]
