"""The lines of transfer files, as OpenNebula 7.4 writes them."""

from __future__ import annotations

from testtools import TestCase

from lab.opennebula import Disk, History, Vm
from lab.opennebula.lines import Lines


class LinesTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.lines = Lines("fe", "/ds")
        disks = [
            Disk(0, "/ds/100/a", 10, 10, "virtman", 100, 1, tm_mad_system="ssh"),
            Disk(1, "rbd:pool/b", 10, 10, "other", 101, 2, clone=False),
            Disk(2, size=5, type="swap"),
            Disk(3, size=6, type="fs", format="raw"),
        ]
        self.vm = Vm(7, disks, [History("h1", 0, "ssh"), History("h2", 1, "local")], deploy_id="one-7")

    def test_prolog(self) -> None:
        self.vm.attributes = {"KERNEL_DS_SOURCE": "/ds/2/k", "KERNEL_DS_DSID": "2", "KERNEL_DS_TM": "ssh"}
        self.assertEqual(
            [
                "CLONE.ssh virtman fe:/ds/100/a h2:/ds/1/7/disk.0 7 100",
                "LN other rbd:pool/b h2:/ds/1/7/disk.1 7 101",
                "MKSWAP local 5 h2:/ds/1/7/disk.2 7 1",
                "MKIMAGE local 6 raw h2:/ds/1/7/disk.3 7 1",
                "CLONE ssh fe:/ds/2/k h2:/ds/1/7/kernel 7 2",
            ],
            list(self.lines.prolog(self.vm)),
        )

    def test_epilog_here_and_of_a_vm_that_is_stopped(self) -> None:
        self.assertEqual(
            [
                "DELETE.ssh virtman h2:/ds/1/7/disk.0 7 100",
                "MVDS other h2:/ds/1/7/disk.1 rbd:pool/b 7 101",
                "DELETE local h2:/ds/1/7/disk.2 7 1",
                "DELETE local h2:/ds/1/7/disk.3 7 1",
                "DELETE local h2:/ds/1/7 7 1",
            ],
            list(self.lines.epilog(self.vm)),
        )
        self.assertEqual("DELETE local fe:/ds/1/7 7 1", list(self.lines.epilog(self.vm, local=True))[-1])

    def test_moves_where_a_mode_sticks_to_the_disks_after_it(self) -> None:
        for lines, here, there in (
            (self.lines.migrate(self.vm), "h1:/ds/0/7", "h2:/ds/1/7"),
            (self.lines.stop(self.vm), "h2:/ds/1/7", "fe:/ds/1/7"),
            (self.lines.resume(self.vm), "fe:/ds/0/7", "h2:/ds/1/7"),
        ):
            drivers = (".ssh virtman", 100), (".ssh other", 101), (".ssh local", 1), (".ssh local", 1)
            disks = [
                f"MV{tm} {here}/disk.{number} {there}/disk.{number} 7 {store}"
                for number, (tm, store) in enumerate(drivers)
            ]
            self.assertEqual([*disks, f"MV local {here} {there} 7 1"], list(lines))
