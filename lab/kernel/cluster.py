"""An origin and hosts with Debian's kernel, on a private network of their own."""

from __future__ import annotations

import logging
import shutil
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lab.cluster import proven_accel, tool
from lab.errors import LabError, Leftovers
from lab.kernel.machine import Machine, Site, make_key, make_share
from lab.kernel.root import root
from lab.running import Running
from lab.tools import CHECKOUT

log = logging.getLogger(__name__)


class KernelCluster(Running):
    """Context manager: ``machines``, by name: origin, host-1, host-2, ….

    A guest reaches servers on this machine's loopback at 10.0.2.2, and the other guests at their ``address``.
    """

    def __init__(self, folder: Path, hosts: int, *, suite: str = "", shared: Sequence[Path] = ()) -> None:
        """Nothing is started yet. ``shared``: folders that guests find in /opt/virtman, beside the project's wheel.

        ``suite``: the codename of the guests' Debian release; this machine's unless given.
        """
        self._folder, self._suite, self._shared = folder, suite, shared
        self._names = ["origin", *(f"host-{number}" for number in range(1, hosts + 1))]
        self._sockets = Path("/nonexistent")
        self.machines: dict[str, Machine] = {}

    def start(self) -> None:
        """Start all guests and wait until they answer. Raises NotReady, NoPackageSources."""
        made = root(self._suite)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._sockets = Path(tempfile.mkdtemp(prefix="kl-", dir="/tmp"))
        make_key(self._sockets / "key")
        share = self._folder / "share.tar"
        # Compiled here: what Debian 12's libraries are enough for runs on Debian 13 as well.
        further = [tool("virtman-chunkd"), CHECKOUT / "deploy", *self._shared]
        make_share(share, self._folder, CHECKOUT, further, made.python)
        accel = proven_accel(made.kernel)
        site = Site(made, share, accel, self._sockets, self._sockets / "key", free_group_port())
        for number, name in enumerate(self._names, start=1):
            self.machines[name] = Machine(name, number, site, self._folder / name)
        for machine in self.machines.values():
            machine.reset_disk()
            machine.start()
        for machine in self.machines.values():
            machine.wait_up()

    def stop(self) -> None:
        """Take all guests' power away and remove what the lab made but for logs. Raises Leftovers with all errors."""
        errors = []
        for machine in self.machines.values():
            try:
                machine.cut_power()
                machine.reset_disk()
            except (LabError, OSError) as error:
                log.error("stopping %s: %s", machine.name, error)
                errors.append(f"{machine.name}: {error}")
        self.machines.clear()
        shutil.rmtree(self._sockets, ignore_errors=True)
        if errors:
            raise Leftovers("; ".join(errors))


def free_group_port() -> int:
    """A UDP port for the private network: labs with different ports do not hear each other."""
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
