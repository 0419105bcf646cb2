"""The agent and Volt as services of a real systemd."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lab.errors import CommandFailed
from tests.kernel.machines import KernelCase
from tests.patience import PATIENCE

pytestmark = pytest.mark.long

UNITS = ("volt.service", "virtman-agent.service")
TOKEN = "/etc/volt/token"
SETTINGS = f"VIRTMAN_STACK=chunkstore\nVIRTMAN_VOLT_TOKEN_FILE={TOKEN}\n"
VOLT_LISTENS = "until (: < /dev/tcp/127.0.0.1/8700) 2>/dev/null; do sleep 0.2; done"
IMAGE = "/root/image.raw"

ENDED = 'while [ "$(systemctl show --value --property=MainPID virtman-agent.service)" = "$0" ]; do sleep 0.2; done'
"""A shell's loop until the agent with this process id is not systemd's any more."""


class ServicesTest(KernelCase):
    def setUp(self) -> None:
        super().setUp()
        self.host.run(["mkdir", "-p", "/etc/volt"])
        self.write(TOKEN, "secret\n")
        self.host.run(["chmod", "600", TOKEN])
        self.write("/etc/default/virtman-agent", SETTINGS)
        self.write(IMAGE, "0123456789abcdef" * 65536)
        for state in ("/var/lib/virtman", "/run/virtman", "/var/lib/private/volt", "/var/lib/volt"):
            self.addCleanup(self.host.run, ["rm", "-rf", state])
        for unit in UNITS:
            self.addCleanup(self.host.run, ["systemctl", "stop", unit])

    def write(self, path: str, content: str) -> None:
        self.host.run(["tee", path], stdin=content)
        self.addCleanup(self.host.run, ["rm", "-f", path])

    def start(self, unit: str) -> None:
        """Start a service; it answers when this returns."""
        try:
            self.host.run(["systemctl", "start", unit])
            if unit == "volt.service":
                self.host.run(["timeout", str(PATIENCE), "bash", "-c", VOLT_LISTENS])
        except CommandFailed:
            self.fail(self.host.run(["journalctl", "--no-pager", "--unit", unit]))

    def virtman(self, *arguments: str) -> Any:
        return json.loads(self.host.run(["virtman", *arguments, "--json"]))

    def daemons(self) -> list[str]:
        return self.host.run(["pgrep", "-x", "virtman-chunkd"]).split()

    def test_the_chunk_store_outlives_the_service_of_the_agent(self) -> None:
        for unit in UNITS:
            self.start(unit)
        self.virtman("publish", "image", IMAGE)
        self.addCleanup(self.virtman, "suspend", "--force")
        before = self.daemons()
        self.assertEqual(1, len(before))
        for command in (["restart"], ["kill", "--signal=KILL", "--kill-who=main"]):
            pid = self.host.run(["systemctl", "show", "--value", "--property=MainPID", "virtman-agent.service"])
            self.host.run(["systemctl", *command, "virtman-agent.service"])
            # systemd hears of the end of one that is killed somewhat later, and takes it for active until then.
            self.host.run(["timeout", "300", "sh", "-c", ENDED, pid.strip()], timeout=400)
            self.start("virtman-agent.service")
            self.assertEqual(before, self.daemons())
        self.assertEqual(["image"], [image["name"] for image in self.virtman("images")])

    def test_volt_keeps_its_state_and_has_no_privileges(self) -> None:
        self.start("volt.service")
        shown = self.host.run(["systemctl", "show", "--value", "--property=MainPID", "volt.service"])
        status = self.host.run(["cat", f"/proc/{shown.strip()}/status"])
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        self.assertNotEqual("0", fields["Uid"].split()[0])
        self.assertEqual(("0" * 16, "1"), (fields["CapEff"], fields["NoNewPrivs"]))
        self.assertEqual("volt.db", self.host.run(["ls", "/var/lib/volt"]).split()[0])

    def test_the_doctor_misses_nothing_for_the_kernel_stack(self) -> None:
        answer = self.virtman("doctor", "--stack", "kernel", "--address", self.host.address)
        self.assertEqual([[]] * 4, [report["missing"] for report in answer["stacks"]["kernel"]])
        self.assertIs(None, answer["lvm"]["trouble"])
        filtered = "/etc/lvm/lvmlocal.conf"
        self.host.run(["mv", filtered, f"{filtered}.away"])
        self.addCleanup(self.host.run, ["mv", f"{filtered}.away", filtered])
        answer = self.virtman("doctor", "--stack", "kernel", "--address", self.host.address)
        self.assertIn("LVM looks at VirtMan's devices", answer["lvm"]["trouble"])
