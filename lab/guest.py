"""A small Debian guest as a complete disk: partition table, boot loader, kernel, systemd; a login prompt on ttyS0.

Any QEMU boots it without further arguments. It is built from the machine's own package sources and kept between runs
under a hash of everything that makes it. Root logs in on the console without a password: it is a guest for tests.

``python -m lab.guest [--suite trixie]`` builds it and prints where it is.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import gzip
import hashlib
import lzma
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lab.errors import CommandFailed, NoPackageSources
from lab.sources import codename, debian_sources
from lab.tools import BUILD, CHECKOUT, run

LAB = CHECKOUT / "lab"
MIB = 1024 * 1024
DISK_BYTES = 2048 * MIB
PARTITION_OFFSET = MIB
ROOT_LABEL = "guest-root"
"""By which guest-initramfs/init finds the root."""

PACKAGES = (
    "busybox-static",
    "kmod",
    "linux-image-cloud-amd64",
    "login",
    "mount",
    "passwd",
    "qemu-guest-agent",  # masked below: a test starts it
    "systemd-sysv",
    "tiny-initramfs",  # stands in for the bigger initramfs tools that the kernel would pull in; ours is made below
    "udev",
)
LEFT_OUT = ("/usr/share/man/*", "/usr/share/doc/*", "/usr/share/info/*", "/usr/share/locale/*")

# Each unit costs boot time under emulation, and none of these does anything for a guest without a network or a past.
# Not every release has all of them.
MASKED = (
    "cryptsetup.target",
    "dev-hugepages.mount",
    "dev-mqueue.mount",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "e2scrub_reap.service",
    "fstrim.timer",
    "getty-static.service",
    "integritysetup.target",
    "kmod-static-nodes.service",
    "ldconfig.service",
    "qemu-guest-agent.service",
    "proc-sys-fs-binfmt_misc.automount",
    "remote-fs.target",
    "sys-fs-fuse-connections.mount",
    "sys-kernel-config.mount",
    "sys-kernel-debug.mount",
    "sys-kernel-tracing.mount",
    "systemd-ask-password-console.path",
    "systemd-ask-password-wall.path",
    "systemd-binfmt.service",
    "systemd-creds.socket",
    "systemd-firstboot.service",
    "systemd-hibernate-clear.service",
    "systemd-hostnamed.socket",
    "systemd-hwdb-update.service",
    "systemd-importd.socket",
    "systemd-initctl.socket",
    "systemd-journal-catalog-update.service",
    "systemd-journal-flush.service",
    "systemd-journald-audit.socket",
    "systemd-logind.service",
    "systemd-machine-id-commit.service",
    "systemd-modules-load.service",
    "systemd-pcrextend.socket",
    "systemd-pcrlock.socket",
    "systemd-pcrmachine.service",
    "systemd-pcrphase-sysinit.service",
    "systemd-pcrphase.service",
    "systemd-pstore.service",
    "systemd-random-seed.service",
    "systemd-remount-fs.service",
    "systemd-repart.service",
    "systemd-sysctl.service",
    "systemd-sysext.socket",
    "systemd-sysusers.service",
    "systemd-tmpfiles-clean.timer",
    "systemd-tmpfiles-setup-dev.service",
    "systemd-tmpfiles-setup.service",
    "systemd-tpm2-setup-early.service",
    "systemd-tpm2-setup.service",
    "systemd-update-done.service",
    "systemd-update-utmp-runlevel.service",
    "systemd-update-utmp.service",
    "systemd-user-sessions.service",
    "veritysetup.target",
)
FIRST_MODULES = ("virtio_pci", "virtio_blk")
INITRD_COMMANDS = ("findfs", "insmod", "mount", "sh", "sleep", "switch_root")
SECOND_MODULES = ("virtio_scsi", "ata_piix", "ahci", "sd_mod")


@dataclass(frozen=True)
class Guest:
    """The disk (raw, sparse), and the kernel and initrd that are also inside it, for a boot without a boot loader."""

    disk: Path
    kernel: Path
    initrd: Path


def guest(suite: str = "", cache: Path = BUILD / "guest") -> Guest:
    """The guest, built now if it is not in the cache. Two builders at a time: the second waits for the first.

    ``suite``: the codename of its Debian release; this machine's unless given. Raises NoPackageSources, CommandFailed.
    """
    suite = suite or codename()
    what = f"the guest (about a minute, once) from Debian {suite} packages"
    home = kept(cache, recipe_hash(suite), what, functools.partial(build, suite))
    return Guest(home / "disk.img", home / "vmlinuz", home / "initrd.img")


def recipe_hash(suite: str) -> str:
    """Names a guest by all that makes it: the release, this file and the files that are laid over it."""
    digest = hashlib.sha256(suite.encode())
    for path in sorted([Path(__file__), *files_below(LAB / "guest-root"), *files_below(LAB / "guest-initramfs")]):
        digest.update(f"\0{path.relative_to(LAB)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def files_below(folder: Path) -> list[Path]:
    """All regular files below a folder."""
    return [path for path in folder.rglob("*") if path.is_file()]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the file's lock; the kernel drops it when the holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def kept(cache: Path, name: str, what: str, build: Callable[[Path, Path], None]) -> Path:
    """The folder ``name`` in ``cache``, built now if it is not there: ``build`` fills it, given a folder to work in.

    It gets its name when it is whole. Of two builders at a time the second waits for the first.
    """
    home = cache / name
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache / "lock"):
        if home.exists():
            return home
        for abandoned in cache.glob("*.tmp"):
            shutil.rmtree(abandoned)
        started = time.monotonic()
        print(f"building {what}", flush=True)
        work = Path(tempfile.mkdtemp(dir=cache, suffix=".tmp"))
        try:
            made = work / "made"
            made.mkdir()
            build(work, made)
            made.rename(home)
        finally:
            shutil.rmtree(work)
        print(f"ready after {time.monotonic() - started:.0f} s: {home}", flush=True)
    return home


def build(suite: str, work: Path, made: Path) -> None:
    """Make the files of a Guest in ``made``."""
    root = work / "root"
    install_packages(root, work / "debian.sources", PACKAGES, suite)
    configure(root, LAB / "guest-root", MASKED, ["nocloud.service", "acpid.service"])
    make_initrd(root)
    shutil.copy(root / "boot/vmlinuz", made / "vmlinuz")
    shutil.copy(root / "boot/initrd.img", made / "initrd.img")
    make_disk(root, made / "disk.img")


def install_packages(root: Path, sources: Path, packages: Sequence[str], suite: str) -> None:
    """Unpack and configure packages of a release in a new folder, as root's own.

    Raises NoPackageSources if the sources of this machine do not hold the release; CommandFailed.
    """
    found = debian_sources(suite)
    sources.write_text("\n".join(source.deb822() for source in found))
    try:
        run(
            ["mmdebstrap", "--variant=essential", "--format=directory", f"--include={','.join(packages)}"]
            + [f"--dpkgopt=path-exclude={pattern}" for pattern in LEFT_OUT]
            + [f"--aptopt={option}" for option in apt_transport_options()]
            + [suite, str(root), str(sources)]
        )
    except CommandFailed as error:
        if lacks_release(error.output, suite):
            places = ", ".join(sorted({source.uri for source in found}))
            raise NoPackageSources(f"this machine's package sources hold no Debian {suite}: {places}") from error
        raise


def lacks_release(said: str, suite: str) -> bool:
    """Whether apt says that a source does not hold a release."""
    return f" {suite} Release' does not have a Release file" in said


def apt_transport_options() -> list[str]:
    """How this machine's apt reaches its sources (proxies, certificates): mmdebstrap does not read it by itself."""
    settings = run(["apt-config", "dump"]).splitlines()
    return [line for line in settings if line.startswith(("Acquire::http", "Acquire::https")) and '""' not in line]


def configure(root: Path, over: Path, masked: Iterable[str], wanted: Iterable[str]) -> None:
    """Lay the files of ``over`` over the root, mask units that only cost boot time, and enable the wanted ones."""
    shutil.copytree(over, root, dirs_exist_ok=True)
    (root / "etc/hostname").write_text("guest\n")
    (root / "etc/hosts").write_text("127.0.0.1 localhost\n")
    (root / "etc/machine-id").write_text("")  # each VM makes its own at its first boot
    units = root / "etc/systemd/system"
    for unit in masked:
        link(units / unit, "/dev/null")
    link(units / "default.target", "/lib/systemd/system/multi-user.target")
    for unit in wanted:
        link(units / "multi-user.target.wants" / unit, f"/etc/systemd/system/{unit}")
    run(["chroot", root, "passwd", "--delete", "root"])
    [kernel] = (root / "boot").glob("vmlinuz-*")
    kernel.rename(root / "boot/vmlinuz")
    for path in (root / "boot").glob("initrd.img-*"):
        path.unlink()


def link(path: Path, target: str) -> None:
    """Make a symlink, replacing what is there."""
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def make_initrd(root: Path, second_modules: Sequence[str] = SECOND_MODULES) -> None:
    """An initramfs of busybox, our init and the disk drivers: a tenth of a general one, and quick under emulation."""
    tree = root / "initramfs"
    for folder in ("dev", "proc", "sys", "root", "bin"):
        (tree / folder).mkdir(parents=True)
    shutil.copy(LAB / "guest-initramfs/init", tree / "init")
    shutil.copy(root / "bin/busybox", tree / "bin/busybox")
    for command in INITRD_COMMANDS:
        (tree / "bin" / command).symlink_to("busybox")
    [modules] = (root / "lib/modules").iterdir()
    first = load_order((modules / "modules.dep").read_text(), FIRST_MODULES)
    second = load_order((modules / "modules.dep").read_text(), second_modules)
    copy_modules(modules, first, tree / "modules/first")
    copy_modules(modules, [path for path in second if path not in first], tree / "modules/second")
    names = "\n".join(str(path.relative_to(tree)) for path in sorted(tree.rglob("*")))
    run(
        [
            "unshare",
            "--root",
            root,
            "--wd",
            "/initramfs",
            "busybox",
            "cpio",
            "-o",
            "-H",
            "newc",
            "-F",
            "/boot/initrd.img",
        ],
        stdin=names + "\n",
    )
    shutil.rmtree(tree)
    # The boot loader reads through the BIOS, a sector run at a time: fewer bytes are worth the unpacking.
    initrd = root / "boot/initrd.img"
    initrd.write_bytes(gzip.compress(initrd.read_bytes(), mtime=0))


def load_order(modules_dep: str, wanted: Sequence[str]) -> list[str]:
    """Paths of the wanted modules, each after those it needs: modules.dep(5). Names that are built in are not there."""
    needs: dict[str, list[str]] = {}
    by_name: dict[str, str] = {}
    for line in modules_dep.splitlines():
        path, _, rest = line.partition(":")
        needs[path] = rest.split()
        by_name[Path(path).name.split(".")[0].replace("-", "_")] = path
    order: list[str] = []
    for path in (by_name[name] for name in wanted if name in by_name):
        # A line of modules.dep names all of a module's needs, nearest first.
        order += [p for p in (*reversed(needs[path]), path) if p not in order]
    return order


def copy_modules(source: Path, paths: Iterable[str], target: Path) -> None:
    """Copy modules, unpacked and numbered in load order."""
    target.mkdir(parents=True)
    for number, path in enumerate(paths):
        content = (source / path).read_bytes()
        plain = lzma.decompress(content) if path.endswith(".xz") else content
        (target / f"{number:02}-{Path(path).name.removesuffix('.xz')}").write_bytes(plain)


def make_disk(root: Path, disk: Path, size: int = DISK_BYTES) -> None:
    """``size`` bytes with one bootable ext4 partition at 1 MiB, which holds ``root``, and extlinux.

    The loader reads neither 64-bit nor checksummed ext4.
    """
    with disk.open("wb") as file:
        os.truncate(file.fileno(), size)
    run(["sfdisk", "--quiet", disk], stdin=f"label: dos\nstart={PARTITION_OFFSET // 512}, type=83, bootable\n")
    features = ["-t", "ext4", "-L", ROOT_LABEL, "-O", "^64bit,^metadata_csum", "-E", f"offset={PARTITION_OFFSET}"]
    run(["mke2fs", "-q", *features, "-d", root, disk, f"{(size - PARTITION_OFFSET) // 1024}k"])
    # In a mount namespace of its own, so that the mount ends with the command whatever happens.
    run(["unshare", "--mount", "--propagation", "private", LAB / "install-extlinux", disk, str(PARTITION_OFFSET)])


def main() -> None:
    """Build the guest and print where it is."""
    parser = argparse.ArgumentParser(prog="python -m lab.guest", description=__doc__)
    add_suite(parser)
    print(guest(parser.parse_args().suite).disk)


def add_suite(parser: argparse.ArgumentParser) -> None:
    """The option that says of which Debian release guests are."""
    parser.add_argument("--suite", default="", help="Debian release of the guests, as trixie (default: this machine's)")


if __name__ == "__main__":
    main()
