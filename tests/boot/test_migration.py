"""A VM moves between two hosts, each with a libvirt of its own, while its guest writes and reads what it wrote."""

from __future__ import annotations

import gc
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import libvirt
import pytest

from lab.cluster import Cluster, tool
from lab.console import Console
from lab.login import io_errors, wait_login
from lab.process import attempts
from tests.boot.test_snapshots import WRITER
from tests.boot.vms import VmTestCase
from tests.patience import PATIENCE
from virtman.errors import AgentUnreachable, BadRequest, HypervisorError, NotSupported, VirtmanError, VmExists, VmMoving
from virtman.models import Sent
from virtman.moving import Destination, Migration, Send, Take, abort

pytestmark = pytest.mark.long

VM = "vm"
CHANGE = "changed by hand"


@pytest.mark.filterwarnings("ignore:unclosed <socket.socket:ResourceWarning")
class MigrationTest(VmTestCase):
    def setUp(self) -> None:
        super().setUp()
        # httpcore 1.0 leaves a unix socket that it could not connect to the garbage collector, which warns of it.
        self.addCleanup(gc.collect)
        self.libvirts = [self.libvirt("root", name) for name in ("here", "there")]
        self.cluster_ = Cluster(self.folder, 2, libvirt=[one.uri for one in self.libvirts])
        self.addCleanup(self.cluster_.stop)
        self.cluster_.start()
        self.here, self.there = self.cluster_.agents
        self.here.publish("guest", self.guest.disk)
        booted = self.here.boot(VM, "guest", memory=256, network="none")
        wait_login(VM, Path(booted.machine.console_log), PATIENCE)
        self.console = Console(self.libvirts[0].uri, VM, PATIENCE)
        self.addCleanup(lambda: self.console.close())
        self.console.run("dd if=/dev/urandom of=data bs=1M count=8 conv=fsync status=none")
        self.data = self.console.run("md5sum data")
        self.here.take_snapshot(VM, "kept")
        self.console.run(f"cat > /run/writer <<'END'\n{WRITER}END")
        self.console.run("touch /root/turn-0; echo 0 > /run/turn; sh /run/writer < /dev/null > /dev/null 2>&1 &")

    def destination(self, host: int = 1) -> Destination:
        """The other host, as it is reached here."""
        return Destination([str(tool("virtman")), "--socket", str(self.cluster_.socket(host))])

    def migration(self, host: int = 1, destination: Destination | None = None) -> Migration:
        client = self.cluster_.agents[1 - host]
        to = self.libvirts[host].uri
        return Migration(client, destination or self.destination(host), VM, to, lambda *_: None)

    def assert_goes_on(self, host: int) -> None:
        """The guest runs at this host, and has what it wrote, without any error."""
        self.console.close()
        self.console = Console.of_shell(self.libvirts[host].uri, VM, PATIENCE)
        self.console.run("echo 3 > /proc/sys/vm/drop_caches")
        self.assertEqual(self.data, self.console.run("md5sum data"))
        whole = 4 + int(self.console.run("cat /run/turn"))
        self.console.run(f"until [ $(cat /run/turn) -ge {whole} ]; do sleep 0.1; done")
        self.assertEqual("", self.console.run("cat /run/bad 2>/dev/null || true"))
        agent = self.cluster_.agents[host]
        self.assertEqual(("running", False), (agent.vm(VM).state, agent.vm(VM).arriving))
        self.assertEqual(["kept"], [snapshot.name for snapshot in agent.snapshots(VM)])
        machine = agent.vm(VM).machine
        assert machine is not None
        self.assertEqual(0, io_errors(Path(machine.console_log)))

    def test_a_vm_moves_there_and_back_whatever_goes_wrong_on_the_way(self) -> None:
        """One test, because a boot takes long."""
        both = libvirt.VIR_DOMAIN_AFFECT_LIVE | libvirt.VIR_DOMAIN_AFFECT_CONFIG
        self.domain().setMetadata(libvirt.VIR_DOMAIN_METADATA_TITLE, CHANGE, None, None, both)
        self.refused()
        self.interrupted()
        moved = self.migration().run()
        self.assertGreater(moved.sent, 8 << 20)
        self.assertEqual([], self.here.vms())
        self.assertEqual([], self.domains(0))
        self.assert_goes_on(1)
        self.cut_off()
        self.assert_goes_on(0)
        for of in (libvirt.VIR_DOMAIN_AFFECT_LIVE, libvirt.VIR_DOMAIN_AFFECT_CONFIG):
            self.assertEqual(CHANGE, self.domain().metadata(libvirt.VIR_DOMAIN_METADATA_TITLE, None, of))
        self.taken_back()

    def refused(self) -> None:
        """What cannot be leaves the VM where it is, and nothing at the other host."""
        self.there.create(VM, "guest")
        self.assertRaises(VmExists, self.migration().run)
        self.there.destroy(VM)
        wrong = Migration(self.here, self.destination(), VM, "qemu+unix:///system?socket=/nowhere", lambda *_: None)
        self.assertRaises(VirtmanError, wrong.run)
        self.assertEqual(([], "running"), (self.there.vms(), self.here.vm(VM).state))
        self.assertEqual(["kept"], [snapshot.name for snapshot in self.here.snapshots(VM)])
        self.assertRaises(BadRequest, abort, self.here, self.destination(), VM)
        self.assertRaises(BadRequest, self.migration(1, self.destination(0)).run)  # it is there already
        other = self.here.migration_source(VM).model_copy(update={"hardware": "pc-q35-99.0"})
        self.assertRaises(NotSupported, self.there.check_arrival, other)
        self.assert_goes_on(0)

    def interrupted(self) -> None:
        """While its memory moves the migration is ended, and the agent killed: the VM goes on, and nothing is left."""
        domain = self.domain()
        domain.migrateSetMaxSpeed(1)
        with ThreadPoolExecutor(1) as pool:
            moving = pool.submit(self.migration().run)
            self.await_memory(domain)
            abort(self.here, None, VM)
            self.assertIsInstance(moving.exception(), HypervisorError)
        self.assertEqual([], self.there.vms())
        self.assert_goes_on(0)
        with ThreadPoolExecutor(1) as pool:
            moving = pool.submit(self.migration().run)
            self.await_memory(domain)
            self.cluster_.kill_agent(0)
            self.assertIsInstance(moving.exception(), VirtmanError)
        self.cluster_.restart_agent(0)
        self.here.repair()
        self.assertEqual("ready", self.here.vm(VM).disk.phase)
        domain.migrateSetMaxSpeed(1 << 20)

    def await_memory(self, domain: libvirt.virDomain) -> None:
        """Wait until libvirt moves the VM's memory."""
        for _ in attempts(PATIENCE):
            if domain.jobStats().get("memory_processed", 0):
                return
        self.fail("no memory moves")

    def domain(self) -> libvirt.virDomain:
        """The VM at the first host."""
        connection = libvirt.open(self.libvirts[0].uri)
        self.addCleanup(connection.close)
        return connection.lookupByName(VM)

    def cut_off(self) -> None:
        """Whoever carries it is gone when the memory went; neither agent starts the VM, and asked again it goes on."""

        def cut(_send: Send) -> Sent:
            raise AgentUnreachable("cut off")

        class Gone(Destination):
            def arrival(self, vm: str, image: str) -> AbstractContextManager[Take]:
                return nullcontext(cut)

        gone = Gone([str(tool("virtman")), "--socket", str(self.cluster_.socket(0))])
        self.assertRaises(AgentUnreachable, self.migration(0, gone).run)
        self.assertEqual(("moved", "arriving"), (self.there.vm(VM).state, self.here.vm(VM).state))
        for host in (0, 1):
            self.cluster_.kill_agent(host)
            self.cluster_.restart_agent(host)
            self.cluster_.agents[host].repair()
            self.assertRaises(VmMoving, self.cluster_.agents[host].start, VM)
        self.migration(0).run()
        self.assertEqual(([], []), (self.there.vms(), self.domains(1)))

    def taken_back(self) -> None:
        """A VM that does not arrive is started where it was; it has all that it wrote to its disk."""
        self.console.run("sync")
        snapshot = self.here.take_snapshot(VM, "virtman-migration-0").name
        with os.fdopen(os.memfd_create("stream"), "r+b") as stream:
            self.here.send(VM, stream, snapshot, with_snapshots=True)
            stream.seek(0)
            self.there.receive(VM, "guest", stream)
        domain = self.there.expect(VM, self.here.migration_source(VM)).domain
        self.here.migrate(VM, self.libvirts[1].uri, domain, snapshot)
        self.assertEqual("moved", self.here.vm(VM).state)
        self.assertRaises(VmMoving, self.there.arrive, VM)
        machine = self.there.vm(VM).machine
        assert machine is not None
        self.assertEqual("paused", machine.state)
        self.assertEqual("off", abort(self.here, self.destination(), VM).state)
        self.assertEqual(([], []), (self.there.vms(), self.domains(1)))
        booted = self.here.start(VM)
        wait_login(VM, Path(booted.machine.console_log), PATIENCE)
        self.console.close()
        self.console = Console(self.libvirts[0].uri, VM, PATIENCE)
        self.assertEqual(self.data, self.console.run("md5sum data"))

    def domains(self, host: int) -> list[str]:
        connection = libvirt.open(self.libvirts[host].uri)
        self.addCleanup(connection.close)
        return [domain.name() for domain in connection.listAllDomains()]
