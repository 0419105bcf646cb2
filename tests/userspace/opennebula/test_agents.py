"""The stand with real agents: a transfer's script reaches each of them by ssh, and no host opens another's disks."""

from __future__ import annotations

import os
from pathlib import Path

from lab.opennebula import Disk, Frontend, Host, Oned, PythonDriver
from tests.userspace.hosts import HostsTestCase
from tests.userspace.opennebula.stand import Probe

CLONE = """
host=${2%%:*} path=${2#*:}
disk=$(ssh "$host" "virtman create one-$3-0-$host img") || exit 1
ssh "$host" "mkdir -p '${path%/*}' && ln -sfn '$disk' '$path'"
"""


class AgentsTest(HostsTestCase):
    def setUp(self) -> None:
        super().setUp()
        if os.geteuid() != 0:
            self.skipTest("hosts are mount namespaces: needs root")
        processes = {name: self.host(name) for name in ("h1", "h2")}
        self.file = self.image_file()
        for process in processes.values():
            process.start()
        hosts = {name: Host(process.run / "agent.sock", (process.state,)) for name, process in processes.items()}
        self.frontend = Frontend(self.folder / "stand", hosts)
        self.frontend.__enter__()
        self.addCleanup(self.frontend.stop)
        self.clients = {name: process.client() for name, process in processes.items()}
        self.clients["h1"].publish("img", self.file)
        Probe(self.frontend).answers("clone", CLONE)
        self.one = Oned(self.frontend, PythonDriver(self.frontend))
        self.one.system_datastore(0)

    def test_a_vm_has_its_disk_by_its_hosts_agent_and_cannot_migrate_live(self) -> None:
        vm = self.one.vm([Disk(0, "/source", 8, 8, "probe", 100, 1)])
        answer = self.one.deploy(vm, "h2", 0)
        self.assertTrue(answer.ok, answer.info)
        link = self.frontend.seen("h2", self.one.lines.folder(vm)) / "disk.0"
        self.assertEqual(link.readlink(), Path(self.clients["h2"].create("one-0-0-h2", "img").disk.path))
        self.assert_same_content(link.readlink(), self.file)
        self.assertEqual([], self.clients["h1"].vms())
        answer = self.one.live_migrate(vm, "h1")
        self.assertIn("Cannot access", answer.reason)
        self.assertTrue(link.is_symlink())
        self.clients["h2"].destroy("one-0-0-h2")
