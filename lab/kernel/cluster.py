"""An origin and hosts with Debian's kernel, on a private network of their own."""

from __future__ import annotations

import logging
import shutil
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from lab.cluster import proven_accel
from lab.errors import LabError, Leftovers
from lab.kernel.machine import Machine, Site, make_key, make_share
from lab.kernel.root import root
from lab.tools import CHECKOUT

log = logging.getLogger(__name__)


class KernelCluster:
    """Context manager: ``machines``, by name: origin, host-1, host-2, ….

    A guest reaches servers on this machine's loopback at 10.0.2.2, and the other guests at their ``address``.
    """

    def __init__(self, folder: Path, hosts: int, *, shared: Sequence[Path] = ()) -> None:
        """Nothing is started yet. ``shared``: folders that guests find in /opt/virtman, beside the project's wheel."""
        self._folder, self._shared = folder, shared
        self._names = ["origin", *(f"host-{number}" for number in range(1, hosts + 1))]
        self._sockets = Path("/nonexistent")
        self.machines: dict[str, Machine] = {}

    def __enter__(self) -> Self:
        """Start all, and leave nothing if that fails half way."""
        try:
            self.start()
        except BaseException:
            log.exception("the kernel lab could not be started")
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop all. An error of the body is not hidden by one of the clean-up."""
        try:
            self.stop()
        except LabError:
            if error is None:
                raise
            log.exception("cleaning up failed too")

    def start(self) -> None:
        """Start all guests and wait until they answer. Raises NotReady."""
        made = root()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._sockets = Path(tempfile.mkdtemp(prefix="kl-", dir="/tmp"))
        make_key(self._sockets / "key")
        share = self._folder / "share.tar"
        make_share(share, self._folder, CHECKOUT, self._shared)
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
