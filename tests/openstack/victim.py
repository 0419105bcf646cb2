"""Nova's services in a process that dies by SIGKILL, and is followed by another one on the same files.

What outlives the process: the databases of Nova and Placement, and Cinder's state, which are files; the agents, Volt,
and what Nova keeps in ``state_path`` and ``instances_path``. The domains of Nova's fake libvirt die with it, as on
hosts that lost their power, and so does what its fake Glance got.

A process is forked from the one of the test, which has imported Nova and started no thread.
"""

from __future__ import annotations

import copy
import os
import signal
import sqlite3
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fixtures
import nova.api.openstack.compute  # noqa: F401  for all processes
import os_vif
from nova import context as nova_context
from nova import objects
from nova.tests import fixtures as nova_fixtures
from oslo_utils.fixture import uuidsentinel

from lab.cluster import Cluster
from tests.openstack.agreement import AgreeingTest
from tests.openstack.cinder import Cinder
from tests.patience import PATIENCE
from virtman.client import AgentClient

CHANGES = ("create", "destroy", "resize", "publish", "publish_in_place", "unpublish", "export_vm", "send")
"""What ``nova.virtman`` calls of an agent's client to change something."""
SIZE = 1 << 20
LARGE = 1000.0
"""How often a host's resources may be given away."""

Script = Callable[["Nova"], object]


class World:
    """What outlives the processes. Use it from one thread."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="virtman-nova-"))
        self.cluster = Cluster(self.folder / "cluster", AgreeingTest.COMPUTES)
        for name in ("cell1", *(f"node_{host}" for host in self.cluster.names)):
            getattr(uuidsentinel, name)  # Nova's fixtures draw these once in each process
        os_vif.initialize()  # imports what each process would else import
        for name in ("databases", "instances", "tmp"):
            (self.folder / name).mkdir()

    def live(self, script: Script) -> str | None:
        """Have a new process do what ``script`` says. Returns the step at which it killed itself, if it did."""
        for told in ("step", "said"):
            (self.folder / told).unlink(missing_ok=True)
        pid = os.fork()
        if pid == 0:
            self._live(script)
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status) and (self.folder / "step").exists():
            return (self.folder / "step").read_text()
        if status != 0:
            said = self.folder / "said"
            raise AssertionError(said.read_text() if said.exists() else f"the process ended with status {status}")
        return None

    def steps(self) -> list[str]:
        """Those that the last process took which lived on."""
        return (self.folder / "steps").read_text().splitlines()

    def _live(self, script: Script) -> None:
        """In the new process, which this ends."""
        signal.alarm(int(PATIENCE))
        code, nova = 1, Nova(self)
        try:
            nova.setUp()
            script(nova)
            code = 0
        except BaseException:  # noqa: BLE001  the test is told
            (self.folder / "said").write_text(f"{traceback.format_exc()}\n{nova.log()}")
        finally:
            os._exit(code)


class Nova(AgreeingTest):
    """All services in this process. They begin with the repair of what was killed before, as ever."""

    def __init__(self, world: World) -> None:
        super().__init__("runTest")
        self._world = world
        self.server: dict[str, Any] = {}
        """That of the script."""
        self._steps: list[str] = []
        self._fatal: int | None = None
        self._counting = threading.Lock()

    def runTest(self) -> None:
        """This is no test; ``unittest`` wants it to have one."""

    def log(self) -> str:
        """What Nova has logged."""
        return str(self.stdlog.logger.output) if hasattr(self, "stdlog") else ""

    # On files

    def setUp(self) -> None:
        databases = self._world.folder / "databases"
        self._is_new = not any(databases.iterdir())
        tempfile.tempdir = str(self._world.folder / "tmp")
        ours: Any = sys.modules["nova.tests.fixtures.nova"]
        placements: Any = sys.modules["nova.tests.functional.fixtures"]
        for module in (ours, placements):
            module._use_file_backed_sqlite_with_wal = lambda name: _database(databases, name)
        if not self._is_new:
            ours.Database._apply_schema = lambda _fixture: None
            ours.CellDatabases._cache_schema = lambda _fixture, _name: None
            ours.DefaultFlavorsFixture.setUp = fixtures.Fixture.setUp
        for name in CHANGES:
            setattr(AgentClient, name, self._stepping(name))
        super().setUp()

    def _setup_cells(self) -> None:
        if self._is_new:
            super()._setup_cells()
            return
        context, databases = nova_context.get_context(), nova_fixtures.CellDatabases()
        for cell in objects.CellMappingList.get_all(context):
            self.cell_mappings[cell.name] = cell
            databases.add_cell_database(cell.database_connection, default=not cell.is_cell0())
        self.useFixture(databases)
        self.host_mappings = {found.host: found for found in objects.HostMappingList.get_all(context)}

    def begin_cluster(self) -> None:
        self.folder, self.cluster = self._world.folder, copy.copy(self._world.cluster)
        self.cluster.reconnect()

    def begin_storage(self) -> None:
        self.flags(instances_path=str(self.folder / "instances"))
        # Nova leaves in Placement what a killed resize had claimed.
        self.flags(cpu_allocation_ratio=LARGE, ram_allocation_ratio=LARGE, disk_allocation_ratio=LARGE)
        self.cinder = self.useFixture(Cinder(self, self.folder / "cinder.json", self.step))
        self.file = self.folder / "base.raw"
        if not self.file.exists():
            self.file.write_bytes(os.urandom(SIZE))
        self.content = self.file.read_bytes()
        self.have_base()

    def have_base(self) -> None:
        """Make the base, if there is none."""
        if not self.cinder.volumes:
            self.volume = self.cinder.add(self.file)
            self.cinder.volumes[self.volume]["size"] = 0  # GiB: no disk is to be grown to it
            self.cinder.keep()
        (self.volume,) = self.cinder.volumes

    def lose_the_snapshot(self) -> None:
        """Let the base be the volume that stood for a snapshot, which an operator has deleted."""
        self.cinder.volumes[self.volume]["volume_metadata"]["virtman_snapshot"] = "gone"
        self.cinder.keep()

    # Its end

    def die_at(self, step: int) -> None:
        """Kill this process at a call that changes something: 0 is before the next one, 1 after it."""
        self._steps, self._fatal = [], step

    def live_on(self) -> None:
        """Do not kill it any more, and keep which steps it took."""
        self._fatal = None
        (self.folder / "steps").write_text("".join(f"{step}\n" for step in self._steps))

    def step(self, name: str) -> None:
        """One call is about to be made, or has been. Those of the test itself, and of the API's, do not count."""
        if threading.current_thread() is threading.main_thread():
            return
        with self._counting:
            if len(self._steps) == self._fatal:
                (self.folder / "step").write_text(name)
                os.kill(os.getpid(), signal.SIGKILL)
            self._steps.append(name)

    def _stepping(self, name: str) -> Any:
        real = getattr(AgentClient, name)

        def call(client: AgentClient, *args: Any, **more: Any) -> Any:
            self.step(f"before {name}")
            answer = real(client, *args, **more)
            self.step(f"after {name}")
            return answer

        return call


def _database(folder: Path, name: str) -> tuple[str, str]:
    """As Nova's fixture makes one, in a place that outlives the process."""
    path = folder / f"{name}.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
    return f"sqlite:///{path}", str(path)
