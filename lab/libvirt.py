"""A libvirtd of the lab's own, with its virtlogd, which shares nothing with one that already runs on the machine.

It lives in a mount namespace where the lab's folders cover those of libvirt, and in a pid namespace, so that its VMs
end with it whatever happens to the lab. Its socket is outside, in a folder with a short path.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import uuid
from pathlib import Path

from lab.process import Service, processes_of, wait_ended
from lab.running import Running
from lab.tools import CHECKOUT

LIBVIRTD_CONF = """\
auth_unix_ro = "none"
auth_unix_rw = "none"
"""
# All else is as Debian has it. The lab's folders may lie where root may go, and Debian's user libvirt-qemu may not. The
# process ids of its VMs are those of another namespace: the control groups of the machine must not get them.
QEMU_CONF = """\
user = "{user}"
group = "{user}"
cgroup_controllers = [ ]
"""
# With a user other than root: OpenNebula's packages leave the owner of disks to OpenNebula, and a VM with a /dev of its
# own cannot have the stand-in for /dev/kvm in there.
USER_CONF = """\
dynamic_ownership = 0
namespaces = [ ]
"""
START_TIMEOUT = 120.0
MOUNT_POINTS = ("/etc/libvirt", "/var/lib/libvirt", "/var/cache/libvirt", "/var/log/libvirt", "/run/libvirt")


class PrivateLibvirt(Running):
    """Context manager; ``uri`` is for libvirt-python, virsh and ``virtman agent --libvirt``."""

    def __init__(self, folder: Path, user: str = "root") -> None:
        """``folder`` is made if needed and keeps the logs. VMs run as ``user``, without KVM if that is not root."""
        self._folder = folder
        self._user = user
        self._run = Path("/nonexistent")
        self._service: Service | None = None
        self._first_process: tuple[int, int] | None = None

    @property
    def uri(self) -> str:
        """The connection URI."""
        return f"qemu+unix:///system?socket={self._run / 'libvirt-sock'}"

    def start(self) -> None:
        """Start libvirtd and wait until it answers. Raises NotReady."""
        for name in ("etc/qemu", "lib", "cache", "log"):
            (self._folder / name).mkdir(parents=True, exist_ok=True)
        # A host of its own: what moves a VM goes by this.
        (self._folder / "etc/libvirtd.conf").write_text(f'{LIBVIRTD_CONF}host_uuid = "{uuid.uuid4()}"\n')
        others = "" if self._user == "root" else USER_CONF
        (self._folder / "etc/qemu.conf").write_text(QEMU_CONF.format(user=self._user) + others)
        if self._user != "root":
            # Where only root may open /dev/kvm, libvirt would ask QEMU anew for each definition what it can do: 9 s.
            (self._folder / "no-kvm").touch(mode=0o600)
        for point in MOUNT_POINTS:
            Path(point).mkdir(parents=True, exist_ok=True)
        self._run = Path(tempfile.mkdtemp(prefix="lv-", dir="/tmp"))
        namespaces = [
            "unshare",
            "--mount",
            "--propagation",
            "private",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
        ]
        self._service = Service(
            "libvirtd",
            # If the lab is killed, unshare is killed, and with it the pid namespace.
            ["setpriv", "--pdeathsig", "KILL", *namespaces, CHECKOUT / "lab/libvirtd-private", self._folder, self._run],
            self._folder / "libvirtd.out",
        )
        self._service.start()
        self.wait_ready()
        self._first_process = self._find_first_process(self._service.pid)

    @property
    def pid(self) -> int:
        """The process id of libvirtd. Killed, it is started again, and its VMs go on."""
        [pid] = [pid for pid, line in processes_of(self._run).items() if line.startswith("libvirtd ")]
        return pid

    def wait_ready(self) -> None:
        """Wait until libvirtd answers. Raises NotReady."""
        if self._service is not None:
            self._service.wait_ready(self._answers, START_TIMEOUT)

    def _answers(self) -> bool:
        import libvirt

        libvirt.registerErrorHandler(lambda _context, _error: None, None)  # it prints what it also raises
        try:
            libvirt.open(self.uri).close()
        except libvirt.libvirtError:
            return False
        return True

    @staticmethod
    def _find_first_process(unshare: int) -> tuple[int, int]:
        [pid] = Path(f"/proc/{unshare}/task/{unshare}/children").read_text().split()
        return int(pid), os.pidfd_open(int(pid))

    def stop(self) -> None:
        """End libvirtd and all its VMs; return when the last is gone. Raises NotReady if one does not end."""
        if self._service is not None:
            self._service.kill()
        if self._first_process is not None:
            pid, pidfd = self._first_process
            self._first_process = None
            try:
                # The first process of a pid namespace ends last: pid_namespaces(7).
                wait_ended(pidfd, pid)
            finally:
                os.close(pidfd)
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._run)
