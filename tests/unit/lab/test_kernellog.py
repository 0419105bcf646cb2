"""What counts as trouble in the logs of kernels and consoles."""

from __future__ import annotations

from testtools import TestCase

from lab.kernel.kernellog import troubles
from lab.login import io_errors
from tests.unit.virtman.scene import folder_for

WARNING = """\
------------[ cut here ]------------
workqueue: WQ_MEM_RECLAIM iscsi_ctrl_1:1:{work} is flushing !WQ_MEM_RECLAIM events:scsi_evt_thread [scsi_mod]
WARNING: CPU: 0 PID: 345 at kernel/workqueue.c:2635 check_flush_dependency.part.0+0xb4/0x100
Modules linked in: iscsi_tcp
Call Trace:
 <TASK>
 __flush_work+0x97/0x1d0
 {caller}+0x10a/0x190
 </TASK>
---[ end trace 0000000000000000 ]---
""".replace("{work}", "__iscsi_unbind_session [scsi_transport_iscsi]")

POWER_WORK_FLUSHED = """\
------------[ cut here ]------------
workqueue: WQ_MEM_RECLAIM iscsi_ctrl_0:1:__iscsi_unbind_session is flushing !WQ_MEM_RECLAIM {work}
WARNING: CPU: 0 PID: 576 at kernel/workqueue.c:2635 check_flush_dependency.part.0+0xb4/0x100
Call Trace:
 <TASK>
 start_flush_work+0xaa/0x2a0
 flush_work+0x46/0x90
 ? klist_release+0xd1/0xf0
 {caller}+0x1c/0x30
 device_pm_remove+0x8a/0xe0
 device_del+0x193/0x410
 scsi_target_reap+0x65/0x80 [scsi_mod]
 scsi_remove_target+0x1e6/0x220 [scsi_mod]
 </TASK>
---[ end trace 0000000000000000 ]---
"""


class TroublesTest(TestCase):
    def test_each_kind_is_found_and_ordinary_lines_are_not(self) -> None:
        lines = [
            "BUG: kernel NULL pointer dereference, address: 0000000000000008",
            "INFO: task dd:1234 blocked for more than 120 seconds.",
            "WARNING: possible circular locking dependency detected",
            "blk_update_request: I/O error, dev sda, sector 0 op 0x0:(READ)",
            "Buffer I/O error on dev dm-0, logical block 0, async page read",
            "WARNING: CPU: 0 PID: 1 at fs/buffer.c:1",
        ]
        ordinary = ["loop0: detected capacity change from 0 to 8", "bcache: register_bdev() registered"]
        self.assertEqual(lines, troubles("\n".join([*ordinary, *lines, *ordinary])))

    def test_a_warning_is_told_with_its_trace_unless_it_is_a_false_alarm(self) -> None:
        power = "pm:pm_runtime_work"
        for warning, is_false in (
            (WARNING.format(caller="flush_work"), False),
            (WARNING.format(caller="__cancel_work_timer"), True),
            (WARNING.format(caller="__cancel_work_timer").replace("Call Trace", "WARNING: CPU: 1\nCall Trace"), False),
            (POWER_WORK_FLUSHED.format(work=power, caller="pm_runtime_remove"), True),
            (POWER_WORK_FLUSHED.format(work=power, caller="other"), False),
            (POWER_WORK_FLUSHED.format(work="events:scsi_evt_thread", caller="pm_runtime_remove"), False),
        ):
            told = [] if is_false else warning.splitlines()
            self.assertEqual(told, troubles(f"virtio_net: up\n{warning}sd 0:0:0:0: attached\n"))

    def test_what_is_said_amid_a_false_alarm_and_around_it_counts(self) -> None:
        errors = [f"I/O error, dev dm-{number}, sector 8" for number in range(3)]
        amid = WARNING.format(caller="__cancel_work_timer").replace(" <TASK>\n", f"{errors[1]}\n")
        self.assertEqual(errors, troubles(f"{errors[0]}\n{amid}{errors[2]}\n"))

    def test_a_line_of_a_console_that_tells_of_a_disk_error_counts_once(self) -> None:
        console = folder_for(self) / "console"
        console.write_text("[ 1.0] I/O error, dev vda, sector 8\n[ 1.1] Buffer I/O error on dev vda1\nvm-1 login: \n")
        self.assertEqual(2, io_errors(console))
