"""One guest of the kernel lab: a QEMU process, and commands in it through ssh."""

from __future__ import annotations

import base64
import contextlib
import shlex
import shutil
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.errors import CommandFailed, NotReady
from lab.kernel.root import Root
from lab.process import Service, attempts
from lab.tools import run

UP_TIMEOUT = 600.0
"""Seconds from the start of a guest to its first answer; 15 on an idle machine under TCG."""

MEMORY = 768
"""MiB."""

COMMAND_TIMEOUT = 2400.0
"""Seconds after which a command is taken for one that hangs. A command is slow with reason: a VM's boot in a guest took
500 s beside a whole test run, and more than 1200 with four programs beside that, that did nothing but count."""

EMULATED = "max,erms=off,fsrm=off,la57=off,smap=off,smep=off,avx=off,avx2=off"
"""Without the features that cost TCG more than they bring: erms and fsrm, by which Linux copies memory byte by byte, in
two to four times the time; a fifth level of page tables, checks at every access to user memory, wide registers."""

PATIENT = f"systemd.default_timeout_start_sec={COMMAND_TIMEOUT:.0f} no_timer_check"
"""Kernel options: an agent takes 12 s of an emulated processor to start, and systemd gives up after 90 s. Whether its
timer works a kernel tells by how far its own loops come meanwhile: on a busy machine it panics (Linux: io_apic.c)."""

QUICK = "mitigations=off norandmaps psi=0 init_on_alloc=0 transparent_hugepage=never"
"""Kernel options. Without norandmaps, TCG translates a program anew each time it is started, since it is at other
addresses then: starting one takes two to five times as long (measured: dmsetup 23 ms, not 110). Without psi and
init_on_alloc, the tests of the bcache driver take a twentieth more processor time: for statistics of pressure, and for
zeros. Without the last one and what EMULATED takes away, tests of drivers take a tenth more."""

PROCESSORS = "1,maxcpus=2"
"""A guest that can have one processor only gets locked instructions without their barrier by TCG, and Linux puts one
between a new request and the look whether QEMU wants to be told of it (QEMU: tcg/tcg-op.c, CF_PARALLEL). Presumably
that is why once in many runs a virtio disk stood still, with 13 requests on their way and QEMU idle."""


@dataclass(frozen=True)
class Site:
    """What the guests of one lab share: the root, the project's files as a tar, the accelerator, and the private net.

    ``sockets`` is a short folder; ``key`` an ssh key pair without a passphrase, ``key`` and ``key.pub``.
    """

    root: Root
    share: Path
    accel: str
    sockets: Path
    key: Path
    port: int


class Machine:
    """A guest. What it writes to its root is kept in ``folder`` until it is made anew, also through a power cut."""

    def __init__(self, name: str, number: int, site: Site, folder: Path) -> None:
        """Nothing is started yet. ``number`` is the last byte of its private address."""
        folder.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.address = f"10.9.0.{number}"
        self.console_log = folder / "console.log"
        self.further_disks: list[Path] = []
        """Raw files that it gets as disks at its next start, in this order, each with its file's name as its serial."""
        self._site, self._number = site, number
        self._overlay = folder / "root.qcow2"
        self._port = 0
        self._service: Service | None = None
        self._forwarded: set[Path] = set()

    def start(self) -> None:
        """Switch it on, with the root as it was when it was switched off."""
        if not self._overlay.exists():
            run(["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", self._site.root.image, self._overlay])
        self._port = free_port()
        self._service = Service(self.name, self._argv(), self.console_log)
        self._service.start()

    def wait_up(self) -> None:
        """Wait until it answers. Raises NotReady."""

        def answers() -> bool:
            with contextlib.suppress(CommandFailed, subprocess.TimeoutExpired):
                self.run(["true"], timeout=60)
                return True
            return False

        self._running().wait_ready(answers, UP_TIMEOUT)

    def run(self, argv: Sequence[str], *, stdin: str = "", timeout: float = COMMAND_TIMEOUT) -> str:
        """Run a command as root and return its standard output.

        Raises CommandFailed with both outputs if it fails; subprocess.TimeoutExpired after ``timeout`` seconds.
        """
        words = [*self._ssh(), "--", shlex.join(argv)]
        done = subprocess.run(words, input=stdin, capture_output=True, text=True, check=False, timeout=timeout)
        if done.returncode != 0:
            raise CommandFailed([self.name, *argv], done.returncode, done.stdout + done.stderr)
        return done.stdout

    def send(self, file: Path, folder: str) -> str:
        """Copy a file of this machine into a folder of the guest, holes as holes; returns its path there.

        Raises CommandFailed; subprocess.TimeoutExpired.
        """
        pack = ["tar", "--create", "--sparse", "-C", str(file.parent), file.name]
        words = [*self._ssh(), "--", shlex.join(["tar", "--extract", "--no-same-owner", "-C", folder])]
        with subprocess.Popen(pack, stdout=subprocess.PIPE) as packing:
            done = subprocess.run(
                words, stdin=packing.stdout, capture_output=True, text=True, check=False, timeout=COMMAND_TIMEOUT
            )
        for argv, code in (([self.name, words[-1]], done.returncode), (pack, packing.returncode)):
            if code != 0:
                raise CommandFailed(argv, code, done.stdout + done.stderr)
        return f"{folder}/{file.name}"

    def begin(self, argv: Sequence[str]) -> subprocess.Popen[str]:
        """Begin a command as root; the process is the caller's, who may write its input and reads its output."""
        words = [*self._ssh(), "--", shlex.join(argv)]
        return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def forward(self, path: str) -> Path:
        """A unix socket of this machine behind which a guest's one answers, until the guest is switched off.

        Raises CommandFailed.
        """
        local = self._site.sockets / f"{self.name}.{Path(path).name}"
        if local not in self._forwarded:
            self.run(["true"])  # there is a connection afterwards
            run([*self._ssh(), "-O", "forward", "-L", f"{local}:{path}"])
            self._forwarded.add(local)
        return local

    @property
    def command_line(self) -> str:
        """What a person types for a shell in it; commands may follow."""
        return shlex.join(self._ssh())

    def kernel_log(self) -> str:
        """What its kernel has said since the boot."""
        return self.run(["dmesg", "--notime"])

    def power_off(self) -> None:
        """Shut it down in good order. Raises NotReady if it does not end."""
        service = self._running()
        with contextlib.suppress(CommandFailed):  # the connection may end before the command does
            self.run(["systemctl", "poweroff"])
        for _ in attempts(UP_TIMEOUT):
            if not service.running:
                self._forget()
                return
        self.cut_power()
        raise NotReady(f"{self.name} did not power off: {service.log_tail()}")

    def cut_power(self) -> None:
        """Take its power away, without a word to anybody. Already off is fine."""
        if self._service is not None:
            self._service.kill()
            self._forget()

    def reset_disk(self) -> None:
        """Forget all that it wrote to its root. It is off."""
        self._overlay.unlink(missing_ok=True)

    def _forget(self) -> None:
        """Drop the connection that ssh keeps to the guest that is gone."""
        self._service = None
        self._forwarded.clear()
        with contextlib.suppress(CommandFailed):
            run([*self._ssh(), "-O", "exit"])
        self._control.unlink(missing_ok=True)

    def _running(self) -> Service:
        if self._service is None:
            raise NotReady(f"{self.name} is off")
        return self._service

    @property
    def _control(self) -> Path:
        return self._site.sockets / self.name

    def _ssh(self) -> list[str]:
        options = {
            "IdentityFile": self._site.key,
            "IdentitiesOnly": "yes",
            "StrictHostKeyChecking": "no",
            "UserKnownHostsFile": "/dev/null",
            "LogLevel": "ERROR",
            "ConnectTimeout": 30,
            "BatchMode": "yes",
            # One connection for all commands: the handshake takes a second of an emulated processor.
            "ControlMaster": "auto",
            "ControlPath": self._control,
            "ControlPersist": "yes",
            "StreamLocalBindUnlink": "yes",
            "Port": self._port,
        }
        words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        return ["ssh", "-F", "none", *words, "root@127.0.0.1"]

    def _argv(self) -> list[str]:
        site = self._site
        key = base64.b64encode(site.key.with_suffix(".pub").read_bytes()).decode()
        said = {"lab.name": self.name, "lab.address": self.address, "lab.key": key}
        told = " ".join(f"{name}={value}" for name, value in said.items())
        forward = f"user,id=outside,restrict=off,hostfwd=tcp:127.0.0.1:{self._port}-:22"
        private = f"socket,id=private,mcast=230.0.0.1:{site.port},localaddr=127.0.0.1"
        mac = f"52:54:00:09:%02x:{self._number:02x}"
        return [
            # A guest does not outlive a lab that is killed.
            *("setpriv", "--pdeathsig", "KILL"),
            *("qemu-system-x86_64", "-name", self.name, "-nographic", "-nodefaults", "-serial", "stdio", "-no-reboot"),
            *("-machine", f"q35,accel={site.accel}", "-m", str(MEMORY), "-smp", PROCESSORS),
            *("-device", "virtio-rng-pci"),
            *("-cpu", "host" if site.accel == "kvm" else EMULATED),
            *("-kernel", str(site.root.kernel), "-initrd", str(site.root.initrd)),
            *("-append", f"console=ttyS0 net.ifnames=0 {QUICK} {PATIENT} panic=-1 loglevel=4 {told}"),
            # In this order, which is that of their names in the guest.
            *_disk(self._overlay, "root", "format=qcow2,cache=unsafe"),
            *_disk(site.share, "share", "format=raw,readonly=on"),
            *(word for disk in self.further_disks for word in _disk(disk, disk.name, "format=raw,cache=unsafe")),
            *("-netdev", forward, "-device", f"virtio-net-pci,netdev=outside,mac={mac % 0}"),
            *("-netdev", private, "-device", f"virtio-net-pci,netdev=private,mac={mac % 1}"),
        ]


def _disk(file: Path, serial: str, options: str) -> list[str]:
    drive = f"file={file},if=none,id=disk-{serial},{options}"
    return ["-drive", drive, "-device", f"virtio-blk-pci,drive=disk-{serial},serial={serial}"]


def make_key(path: Path) -> None:
    """A new ssh key pair without a passphrase, for one lab."""
    run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "lab", "-f", path])


def free_port() -> int:
    """A TCP port of the loopback address that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


Python = Callable[[Path], list[str]]
"""What begins a command of the guests' Python that runs on this machine, in the folder: Root.python."""


def make_share(share: Path, work: Path, wheel_of: Path, further: Sequence[Path], python: Python) -> None:
    """A tar of the project's wheel and of ``further`` files and folders, as long as a disk has to be."""
    wheels = work / "share"
    shutil.rmtree(wheels, ignore_errors=True)
    wheels.mkdir(parents=True)
    build_wheel(wheel_of, wheels, python)
    names = [word for one in further for word in ("-C", one.parent, one.name)]
    run(["tar", "--exclude=__pycache__", "-c", "-f", share, "-C", wheels, ".", *names])
    with share.open("ab") as file:
        file.truncate(-(-file.tell() // 1048576) * 1048576)


def build_wheel(project: Path, target: Path, python: Python) -> None:
    """The project's wheel, from a copy of its sources: building leaves files beside them.

    Without those of the chunk store, which would be compiled for each wheel.
    """
    copy = target / "sources"
    copy.mkdir()
    for name in ("virtman", "volt", "drivers"):
        shutil.copytree(project / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(project / name, copy / name)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "wheel"]
    run([*pip, "--no-deps", "--wheel-dir", target, copy])
    shutil.rmtree(copy)
    for wheel in target.glob("*.whl"):
        compile_wheel(wheel, python)


def compile_wheel(wheel: Path, python: Python) -> None:
    """Add byte code of the guests' Python, which their emulated processors would take seconds to make."""
    unpacked = wheel.with_suffix(".unpacked")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(unpacked)
    # Whoever unpacks it gives the sources times of his own.
    run([*python(unpacked), "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", "."])
    Path(shutil.make_archive(str(unpacked), "zip", unpacked)).rename(wheel)
    shutil.rmtree(unpacked)
