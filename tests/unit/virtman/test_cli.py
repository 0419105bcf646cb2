"""The command line, against an agent on a unix socket."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import chain, islice, repeat
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any
from unittest import mock

import click
import libvirt
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result
from testtools import TestCase
from testtools.matchers import Contains, MatchesRegex

from drivers.base import Filled
from drivers.cachemodels import VolumeState
from tests.doubles.drivers import BYTES_PER_FETCH, POOL
from tests.doubles.servers import serve_agent
from tests.doubles.volt import digest_of
from tests.patience import PATIENCE, wait_until
from tests.unit.virtman.agents import MIB, SiteCase
from tests.unit.virtman.devices import some_device
from tests.unit.virtman.hypervisor import LIBVIRT
from tests.unit.virtman.scene import folder_for
from virtman.accel import QEMU
from virtman.api import create_app
from virtman.cli import main
from virtman.cli.migrate import interrupted
from virtman.cli.output import Failure
from virtman.client import AgentClient
from virtman.errors import CoordinatorDown, VoltRefused
from virtman.stream import Header, Section, write
from volt.client import Deployment, DeploymentHost, DeploymentLeg, Host, HostState, TransferState

BAD_NAMES = ["a/b", "../x", "a.b", "..", "a" * 300, "a b", ""]
BOOT = ("--memory", "64", "--network", "none")


class CliTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.socket = folder_for(self) / "agent.sock"

    def run_virtman(self, *arguments: object, code: int = 0) -> Result:
        """Run a command. Nothing but its own exit ends it, and what it prints is in the result."""
        result = CliRunner().invoke(main, ["--socket", str(self.socket), *map(str, arguments)])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        # 3: as 1, of what was named and is not there.
        expected = 3 if code == 1 and result.exit_code == 3 else code
        self.assertEqual(expected, result.exit_code, result.output)
        return result

    def out(self, *arguments: object) -> str:
        """What a command that works prints; nothing goes to stderr."""
        result = self.run_virtman(*arguments)
        self.assertEqual("", result.stderr)
        return result.stdout

    def json(self, *arguments: object) -> Any:
        """What a command prints for scripts."""
        return json.loads(self.out(*arguments, "--json"))

    def fails(self, *arguments: object) -> str:
        """The one line on stderr of a command that fails."""
        result = self.run_virtman(*arguments, code=1)
        self.assertEqual("", result.stdout)
        self.assertThat(result.stderr, MatchesRegex(r"virtman: [^\n]+\n$"))
        return result.stderr

    def misused(self, *arguments: object) -> str:
        """What a command that was called wrongly prints on stderr."""
        return self.run_virtman(*arguments, code=2).stderr


class AgentCliTest(SiteCase, CliTest):
    def setUp(self) -> None:
        super().setUp()
        serve_agent(self, create_app(self.agent), self.socket)


class SnapshotCommandsTest(AgentCliTest):
    def setUp(self) -> None:
        super().setUp()
        self.out("create", "vm", "debian")

    def names(self) -> list[str]:
        return [line.split("  2")[0].rstrip() for line in self.out("snapshot", "list", "vm").splitlines()[1:]]

    def test_they_are_listed_as_a_tree(self) -> None:
        for name in ("one", "two"):
            self.assertThat(self.out("snapshot", "create", "vm", name), Contains(f"vm has the snapshot {name}: "))
        self.out("snapshot", "revert", "vm", "one")
        self.assertEqual(["one *", "two"], self.names())
        self.out("snapshot", "create", "vm", "tri")
        self.assertEqual(["one", "  two", "  tri *"], self.names())
        self.out("snapshot", "delete", "vm", "one")
        self.assertEqual(["  two", "  tri *"], self.names())

    def test_for_scripts(self) -> None:
        one = self.json("snapshot", "create", "vm", "one")
        self.assertEqual(("one", None, "crash", True), (one["name"], one["parent"], one["state"], one["current"]))
        self.assertEqual([one], self.json("snapshot", "list", "vm"))
        self.assertEqual("vm", self.json("snapshot", "revert", "vm", "one")["name"])
        self.assertEqual({"deleted": "one"}, self.json("snapshot", "delete", "vm", "one"))

    def test_shells_complete_names(self) -> None:
        self.out("snapshot", "create", "vm", "one")
        for words, begun, names in (
            (["rename"], "v", ["vm"]), (["rename"], "x", []), (["attach-disk", "vm"], "", ["vm"]),
            (["create", "new"], "de", ["debian"]), (["show"], "", ["debian", "vm"]),
            (["publish", "new", "--parent"], "de", ["debian"]),
            (["snapshot", "revert", "vm"], "o", ["one"]),
            (["snapshot", "revert", "unknown"], "o", []),
        ):  # fmt: skip
            shell = ShellComplete(main, {}, "virtman", "_VIRTMAN_COMPLETE")
            found = shell.get_completions(["--socket", str(self.socket), *words], begun)
            self.assertEqual(names, [one.value for one in found])

    def test_what_is_not_there_fails(self) -> None:
        for command in ("revert", "delete"):
            self.assertThat(self.fails("snapshot", command, "vm", "one"), Contains("no snapshot 'one'; it has: none"))
            self.assertThat(self.fails("snapshot", command, "other", "one"), Contains("'other' is not on this host"))
        for name in BAD_NAMES:
            self.fails("snapshot", "create", "vm", name)

    def test_a_disk_grows(self) -> None:
        self.assertThat(self.out("resize", "vm", "4M"), Contains("the disk of vm has 4M now"))
        self.assertEqual(4 * MIB, self.json("resize", "vm", "4M")["disk"]["size"])
        self.assertThat(self.fails("resize", "vm", "2M"), Contains("cannot be made smaller"))
        self.assertThat(self.fails("resize", "vm", "4194305"), Contains("multiple of 512"))
        self.assertThat(self.fails("resize", "vm", "9999999T"), Contains("at most 128T"))
        self.assertThat(self.misused("resize", "vm", "big"), Contains("is not a size"))

    def test_clone(self) -> None:
        for _ in range(2):
            self.assertEqual("/disks/new.qcow2\n", self.out("clone", "vm", "new"))
        self.assertEqual("/disks/of-1.qcow2\n/disks/of-2.qcow2\n", self.out("clone", "new", "of", "--count", "2"))
        self.assertEqual(["new"], [vm["disk"]["source"] for vm in self.json("clone", "new", "of", "--count", "1")])
        self.assertThat(self.out("show", "of-1"), Contains("clone of"))
        self.assertThat(self.fails("clone", "vm", "of-1"), Contains("no clone of 'vm'"))
        self.assertThat(self.misused("clone", "vm", "x", "--count", "0"), Contains("range"))

    def test_export_and_publish_of_a_vm(self) -> None:
        file = self.site.folder / "file"
        said = self.out("export", "vm", str(file), "--format", "qcow2")
        self.assertThat(said, Contains(f"{file}: a qcow2 disk of 1M (as after a power cut"))
        self.assertThat(self.fails("export", "vm", str(file)), Contains(f"{file} exists"))
        self.assertThat(self.fails("export", "vm", f"{file}-2", "--image"), Contains("no image vm is"))
        self.assertThat(self.fails("export", "debian", f"{file}-2"), Contains("cannot copy image debian"))
        missing = self.run_virtman("export", "other", f"{file}-2", code=3)
        self.assertThat(missing.stderr, Contains("no VM 'other'"))
        self.assertThat(self.out("publish", "mine", "--from-vm", "vm"), Contains("mine: 1M, blake3-64k:"))
        for arguments in ([], [str(file), "--from-vm", "vm"]):
            self.assertThat(self.misused("publish", "mine", *arguments), Contains("either FILE or --from-vm VM"))


class VmCommandsTest(AgentCliTest):
    def test_create_prints_the_path_and_can_replace_a_disk(self) -> None:
        for _ in range(2):
            self.assertEqual("/disks/vm.qcow2\n", self.out("create", "vm", "debian", "--size", "2M"))
        self.fails("create", "vm", "debian", "--size", "513", "--replace")
        self.patch(AgentClient, "tree", None)  # a tree of very many hosts is only for people who ask for it
        self.run_virtman("create", "vm", "none", "--replace", code=3)
        self.assertEqual(2 * MIB, self.json("show", "vm")["disk"]["size"])
        self.assertEqual("/disks/vm.qcow2\n", self.out("create", "vm", "debian", "--replace"))
        self.assertEqual(MIB, self.json("show", "vm")["disk"]["size"])
        self.out("create", "new", "debian", "--replace")

    def test_sizes(self) -> None:
        for vm, (text, size) in enumerate({"1024K": MIB, "2m": 2 * MIB, "20G": 20 << 30, "1T": 1 << 40}.items()):
            self.assertEqual(size, self.json("create", vm, "debian", "--size", text)["disk"]["size"])
        for text in ("", "G", "20X", "20GB", "20 G", "-1", "1.5G", "0x10", "1e9", "²", "a" * 300):
            self.assertThat(self.misused("create", "vm", "debian", "--size", text), Contains("is not a size"))
        for text in ("0", "513", "9999999T"):
            for command in ("create", "boot"):
                self.assertThat(self.fails(command, "vm", "debian", "--size", text), Contains("is not possible"))
        self.run_virtman("show", "vm", code=3)

    def test_destroy(self) -> None:
        for vm in ("a", "b"):
            self.out("create", vm, "debian")
        self.assertEqual("", self.out("destroy", "a"))
        self.assertEqual({"destroyed": "b"}, self.json("destroy", "b"))
        self.assertEqual({}, self.site.host.disks)

    def test_list(self) -> None:
        names = ["web-1", "web-2", "web-10"]
        for name in names:
            self.out("create", name, "debian")
        lines = self.out("list").splitlines()
        self.assertEqual(["VM", "IMAGE", "SIZE", "STATE"], lines[0].split())
        self.assertEqual(["web-1", "debian", "1M", "disk"], lines[1].split())
        self.assertEqual((names, names), ([x.split()[0] for x in lines[1:]], [vm["name"] for vm in self.json("list")]))

    def test_a_command_imports_only_what_it_needs(self) -> None:
        heavy = {"httpx", "rich", "flask", "werkzeug", "sqlalchemy", "libvirt", "pycdlib", "virtman.agent"}
        for command, more in (("--help", {"pydantic", "http.client"}), ("list", {"virtman.pipe", "drivers.base"})):
            code = f"""import sys
from virtman.cli import main
main(["--socket", {str(self.socket)!r}, {command!r}], standalone_mode=False)
sys.exit(repr({heavy | more} & set(sys.modules)))"""
            done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
            self.assertEqual("set()\n", done.stderr, command)

    def test_boot_with_all_that_it_can_be_given(self) -> None:
        key, user_data = self.socket.parent / "key.pub", self.socket.parent / "user-data"
        key.write_text("ssh-ed25519 AAAA\n\nssh-rsa BBBB\n")
        user_data.write_text("#cloud-config\n{}\n")
        answer = self.json(
            "boot", "vm", "debian", "--size", "2M", *BOOT, "--cpus", 2, "--cloud-init", user_data, "--ssh-key", key
        )
        self.assertEqual((2 * MIB, "tcg"), (answer["disk"]["size"], answer["machine"]["accel"]))
        self.assertEqual(["vm"], self.site.domains())
        seed = (self.site.config.state / "machines" / "vm.seed.iso").read_bytes()
        for text in (b"ssh-ed25519 AAAA", b"ssh-rsa BBBB", b"#cloud-config"):
            self.assertIn(text, seed)

    def test_boot_refuses_what_it_cannot_do(self) -> None:
        for wrong in (("--memory", 31), ("--memory", "big"), ("--cpus", 0), ("--cloud-init", "/nonexistent"), ("--x",)):
            self.misused("boot", "vm", "debian", *wrong)
        for wrong in (("--network", "wifi"), ("--cpus", 1000), ("--memory", 1 << 40)):
            self.fails("boot", "vm", "debian", *wrong)
        self.assertEqual({}, self.site.host.leftovers())

    def test_stop_and_start(self) -> None:
        self.out("boot", "vm", "debian", *BOOT)
        self.assertEqual("", self.out("stop", "vm"))
        self.assertEqual("off", self.json("show", "vm")["machine"]["state"])
        self.assertThat(self.out("start", "vm"), MatchesRegex(r"vm is running; .*virtman console vm\n$"))
        self.assertEqual({"stopped": "vm"}, self.json("stop", "vm", "--force"))
        with mock.patch.object(libvirt.virDomain, "state", return_value=[libvirt.VIR_DOMAIN_PAUSED, 0]):
            for command in (("boot", "vm", "debian", *BOOT), ("start", "vm")):
                self.assertIn("vm is paused", self.out(*command))
                self.assertEqual("paused", self.json(*command)["machine"]["state"])

    def test_a_disk_is_attached_and_detached(self) -> None:
        self.out("boot", "vm", "debian", *BOOT)
        self.out("create", "data", "debian")
        self.out("stop", "vm", "--force")
        for _ in range(2):
            self.assertEqual("vm has the disks: data\n", self.out("attach-disk", "vm", "data"))
        self.assertThat(self.out("show", "vm"), MatchesRegex(r"(?s).*further disks +data\n"))
        self.assertEqual({"data": "disk of vm", "vm": "off"}, self.states())
        self.assertThat(self.fails("destroy", "data"), Contains("attached to vm 'vm'; detach it there first"))
        self.assertEqual(["data"], self.json("show", "vm")["disks"])
        self.assertEqual("vm", self.json("show", "data")["disk"]["attached_to"])
        self.assertEqual("data is detached from vm\n", self.out("detach-disk", "vm", "data"))
        self.assertEqual([], self.json("detach-disk", "vm", "data")["disks"])
        self.assertEqual({"data": "disk", "vm": "off"}, self.states())

    def test_a_vm_gets_another_name(self) -> None:
        self.out("create", "vm", "debian")
        for _ in range(2):
            self.assertEqual("/disks/shop.qcow2\n", self.out("rename", "vm", "shop"))
        self.assertEqual({"shop": "disk"}, self.states())

    def test_a_migration_that_cannot_be(self) -> None:
        self.out("create", "vm", "debian")
        for wrong in ((), ("--live",), ("--to", "qemu+ssh://b/system")):
            self.assertThat(self.misused("migrate", "vm", *wrong), Contains("--live --to URI"))
        there = ("--live", "--to", "qemu+tls://b/system")
        self.assertThat(self.fails("migrate", "vm", *there), Contains("--agent"))
        self.assertThat(self.fails("migrate", "vm", *there, "--agent", "false"), Contains("never booted"))
        self.assertThat(self.fails("migrate", "vm", "--abort"), Contains("is not being moved"))
        self.assertEqual({"vm": "disk"}, self.states())

    def test_whatever_ends_a_migration_is_ctrl_c_but_what_nohup_ignores(self) -> None:
        for number, handler in ((signal.SIGHUP, signal.SIG_IGN), (signal.SIGTERM, signal.SIG_DFL)):
            self.addCleanup(signal.signal, number, signal.signal(number, handler))

        def ended() -> None:
            with interrupted("vm"):
                self.assertEqual(signal.SIG_IGN, signal.getsignal(signal.SIGHUP))
                signal.raise_signal(signal.SIGTERM)

        self.assertThat(str(self.assertRaises(Failure, ended)), Contains("interrupted"))
        after = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
        self.assertEqual([signal.SIG_DFL, signal.SIG_IGN], after)

    def test_a_stream_is_refused_while_who_sends_it_is_slow(self) -> None:
        self.out("create", "vm", "debian")
        section = Section(id="1f" * 16, name=None, parent=None, size=MIB, taken=1.5, state="off")
        header = Header(image=digest_of("debian"), since=None, sections=(section,), total=0)
        for command in (("receive",), ("arrival", "end")):
            process = self.begin(*command, "vm", "debian")
            assert process.stdin
            process.stdin.write(b"".join(islice(write(header, []), 2)))
            process.stdin.flush()
            self.assertEqual("virtman: vm 'vm' exists; destroy it first or use another name\n", self.said(process))

    def test_a_stream_is_interrupted_while_who_sends_it_is_slow(self) -> None:
        for command in (("receive",), ("arrival", "end")):
            process = self.begin(*command, "vm", "debian")
            wait_until(lambda: self.agent.vms.receiving._sending)
            process.send_signal(signal.SIGINT)
            self.assertEqual("\nAborted!\n", self.said(process))
            wait_until(lambda: not self.agent.vms.receiving._sending)

    def begin(self, *arguments: str) -> subprocess.Popen[bytes]:
        """A command whose standard input stays open."""
        # Whoever runs tests in the background may have had them ignore the signal.
        python = ["env", "--default-signal=INT", sys.executable]
        argv = [*python, "-m", "virtman.cli", "--socket", str(self.socket), *arguments]
        process = self.enterContext(subprocess.Popen(argv, stdin=PIPE, stdout=PIPE, stderr=PIPE))
        self.addCleanup(process.kill)
        return process

    def said(self, process: subprocess.Popen[bytes]) -> str:
        """What a command says that fails by itself."""
        assert process.stdout and process.stderr
        self.assertEqual(1, process.wait(PATIENCE))
        self.assertEqual(b"", process.stdout.read())
        return process.stderr.read().decode()

    def states(self) -> dict[str, str]:
        """The last column of the list."""
        lines = [re.split("  +", line) for line in self.out("list").splitlines()[1:]]
        return {line[0]: line[-1] for line in lines}

    def test_show_has_all_of_one_vm(self) -> None:
        self.out("create", "disk", "debian")
        self.assertThat(self.out("show", "disk"), Contains("/disks/disk.qcow2"))
        self.out("boot", "vm", "debian", *BOOT)
        lines = dict(line.split("  ", 1) for line in self.out("show", "vm").splitlines())
        shown = {name.strip(): value.strip() for name, value in lines.items()}
        self.assertEqual(("running", "debian", "64M"), (shown["state"], shown["image"], shown["memory"]), str(shown))
        defined = self.site.hypervisor.lookupByName("vm")
        self.assertEqual(defined.UUIDString(), shown["UUID"])
        self.assertEqual("-", shown["MAC address"])  # it has no network
        self.out("boot", "other", "debian", "--memory", "64")
        mac = self.json("show", "other")["machine"]["mac"]
        self.assertIn(f"<mac address='{mac}'/>", self.site.hypervisor.lookupByName("other").XMLDesc())
        self.assertEqual(json.loads(shown["for --blockdev"]), self.json("show", "vm")["disk"]["blockdev"])
        self.assertThat(self.fails("show", "unknown"), Contains("'unknown'"))

    def test_console(self) -> None:
        self.out("boot", "vm", "debian", *BOOT)
        where = self.json("console", "vm")
        self.assertEqual((LIBVIRT, "vm"), (where["libvirt"], where["domain"]))
        Path(where["log"]).write_bytes(b"login: \xff\n")
        self.assertEqual(b"login: \xff\n", self.run_virtman("console", "vm", "--log").stdout_bytes)
        Path(where["log"]).unlink()
        self.assertThat(self.fails("console", "vm", "--log"), Contains("was it booted?"))
        self.enterContext(mock.patch.dict(os.environ, PATH=str(self.socket.parent)))
        self.assertThat(self.fails("console", "vm"), Contains("libvirt-clients"))

    def test_files_that_are_no_text_fail_in_one_line(self) -> None:
        file = self.socket.parent / "binary"
        file.write_bytes(b"\xff\xfe\0")
        for option in ("--cloud-init", "--ssh-key"):
            self.assertThat(self.fails("boot", "vm", "debian", option, file), Contains(str(file)))
        self.assertEqual({}, self.site.host.leftovers())

    def test_unknown_names_fail_in_one_line(self) -> None:
        for command in (("create", "vm", "none"), ("show", "none"), ("unpublish", "none")):
            self.assertThat(self.run_virtman(*command, code=3).stderr, MatchesRegex(r"virtman: .*'?none.*\n$"))


class ImageCommandsTest(AgentCliTest):
    def test_publish(self) -> None:
        file = self.site.image_file()
        self.addCleanup(os.chdir, Path.cwd())
        os.chdir(file.parent)
        self.assertThat(self.out("publish", "mine", file.name), MatchesRegex(r"mine: 1M, blake3-64k:[0-9a-f]{64}\n$"))
        (line,) = [line for line in self.out("images").splitlines() if line.startswith("mine ")]
        self.assertThat(line, MatchesRegex(r".* published$"))
        self.assertEqual("other is being published\n", self.out("publish", "other", file, "--detach"))
        wait_until(lambda: "other" in self.site.volt.images)

    def test_publish_with_a_parent_and_show_what_is_shared(self) -> None:
        self.out("publish", "base", self.site.image_file())
        file = self.site.image_file("child.raw", size=2 * MIB)
        self.out("publish", "child", file, "--parent", "base")
        shown = dict(re.split("  +", line, maxsplit=1) for line in self.out("show", "child").splitlines())
        self.assertEqual(("child", "published", "2M", "yes", "base"),
                         tuple(shown[name] for name in ("name", "state", "size", "verified", "parent")))  # fmt: skip
        self.assertEqual(("here", "-", "origin (attached)"), (shown["origins"], shown["hosts"], shown["here"]))
        amounts = ("data", "own data", "shared with the parent")
        self.assertEqual(["2M", "1M", "1M"], [shown[name] for name in amounts])
        said = self.json("show", "child")
        self.assertEqual([2 * MIB, MIB, MIB], [said[f"{name}_bytes"] for name in ("data", "own", "shared")])
        self.out("unpublish", "base")
        self.assertThat(self.out("show", "child"), Contains("shared with the parent  unknown here"))
        self.assertEqual("base", self.json("show", "child")["parent"])

    def test_show_an_image_that_is_not_verified_and_one_with_the_name_of_a_vm(self) -> None:
        self.out("create", "debian", "debian")
        self.assertThat(self.out("show", "debian"), Contains("/disks/debian.qcow2"))
        shown = self.out("show", "debian", "--image")
        self.assertThat(shown, MatchesRegex(r"(?s).*verified +no, .*hosts +here\nhere +host \(attached\)\n$"))
        self.assertThat(self.fails("show", "nothing", "--image"), Contains("no image nothing is published"))

    def test_a_parent_goes_with_a_file_that_is_copied(self) -> None:
        for words in (["--from-vm", "vm"], ["/file", "--in-place"]):
            said = self.misused("publish", "mine", *words, "--parent", "debian")
            self.assertThat(said, Contains("--parent goes with FILE"))
        self.assertThat(self.fails("publish", "mine", self.site.image_file(), "--parent", "a/b"), Contains("'a/b'"))

    def test_publish_in_place(self) -> None:
        file = self.site.image_file()
        printed = self.out("publish", "mine", str(file), "--in-place")
        self.assertThat(printed, MatchesRegex(r"mine: 1M, id:[0-9a-f]{64}\n$"))
        self.assertThat(self.out("images"), Contains("origin in place (attached)"))
        self.assertThat(self.out("status"), Contains(str(file)))
        digest = self.site.volt.images["debian"].digest
        self.assertThat(self.fails("publish", "debian", str(file), "--in-place"), Contains(f"--trust {digest}"))
        self.assertThat(self.out("publish", "debian", str(file), "--in-place", "--trust", digest), Contains(digest))

    def test_options_of_publish_in_place_go_with_it(self) -> None:
        for words in (["--trust", "id:1"], ["--digest"]):
            self.assertThat(self.misused("publish", "mine", "/file", *words), Contains("go with --in-place"))
        for words in ([], ["--from-vm", "vm"], ["/file", "--from-vm", "vm"], ["/file", "--detach"]):
            self.assertThat(
                self.misused("publish", "mine", "--in-place", *words), Contains("--in-place goes with FILE")
            )
        file = str(self.site.image_file())
        said = self.fails("publish", "mine", file, "--in-place", "--trust", "md5:1")
        self.assertThat(said, Contains("(blake3-64k|sha256|pieces|id):"))

    def test_unpublish(self) -> None:
        self.run_virtman("publish", "mine", self.site.image_file())
        self.site.volt.read_by_others("mine")
        self.assertThat(self.fails("unpublish", "mine"), Contains("in use by h7"))
        self.site.volt.read_by_others("mine", 0)
        self.run_virtman("create", "vm", "mine")
        self.assertThat(self.out("unpublish", "mine"), Contains("until its VMs are destroyed"))
        answer = {"name": "mine", "serving": True, "withdrawn": False}
        self.assertEqual(answer, self.json("unpublish", "mine"))
        self.run_virtman("destroy", "vm")
        wait_until(lambda: "mine" not in self.site.host.served)

    def test_unpublish_when_unused(self) -> None:
        self.run_virtman("publish", "mine", self.site.image_file())
        self.site.volt.read_by_others("mine")
        self.assertThat(self.out("unpublish", "mine", "--when-unused"), Contains("is removed when no host needs it"))
        self.assertTrue(self.json("unpublish", "mine", "--when-unused")["withdrawn"])

    def test_hydrate(self) -> None:
        self.assertThat(self.fails("hydrate", "debian"), Contains("only the stack chunkstore"))
        filled = [Filled(done=MIB // 2, goes_on=True)]
        for name, is_now in (
            ("fills", True),
            ("fill", mock.Mock()),
            ("pin", mock.Mock()),
            ("filled", lambda _: filled[0]),
        ):
            self.patch(self.agent.stacks.source, name, is_now)
        self.assertThat(self.out("hydrate", "debian"), Contains("is being read"))
        self.assertThat(self.out("status"), Contains("attached, 50% hydrated"))
        filled[0] = Filled(done=MIB, whole=True)
        self.assertThat(self.out("hydrate", "debian", "--until-ready"), Contains("all of it is here"))
        self.assertThat(self.out("status"), Contains("attached, whole"))
        self.assertEqual({"done": MIB, "total": MIB, "whole": True}, self.json("hydrate", "debian"))
        self.assertThat(self.out("hydrate", "debian", "--cancel"), Contains("not kept as a whole any more"))
        self.assertNotIn("whole", self.out("status"))
        self.run_virtman("hydrate", "debian", "--cancel", "--until-ready", code=2)

    def test_deploy_and_deployments(self) -> None:
        ends = [
            DeploymentHost(host="one", place="paris/1", state=TransferState.WHOLE, done=MIB, total=MIB, seconds=1.5),
            DeploymentHost(host="two", state=TransferState.FAILED, error="no room", seconds=2),
        ]
        made = Deployment(
            id=7, image="debian", size=MIB, digest="id:x", asked="auto", method="tree", encrypt=None, keep_s=2 * 86400,
            created=datetime(2026, 1, 1, tzinfo=UTC), seconds=2, ended=True, cancelled=False, hosts=ends,
            legs=[DeploymentLeg(source="first", sent=3 * MIB, receivers=1, begun=1, ended=True)],
            predicted={"uftp": 9.0, "tree": 2.5}, why="it is small",
        )  # fmt: skip
        deploy, cancel = mock.Mock(return_value=made), mock.Mock()
        for name, call in (
            ("deploy", deploy),
            ("cancel_deployment", cancel),
            ("deployment", mock.Mock(side_effect=chain([CoordinatorDown("Volt does not answer")], repeat(made)))),
            ("deployments", lambda: [made]),
        ):
            self.patch(self.agent.stacks.volt, name, call)
        done = self.run_virtman("deploy", "debian", "--to", "one,two", "--keep", "2", code=1)
        self.assertIn("Volt does not answer; waiting for Volt, while the deployment goes on\n", done.stderr)
        self.assertEqual("deployment 7: debian by tree, ended after 2.0 s", done.stdout.splitlines()[0])
        lines = r"(?s).*one +paris/1 +whole +100% +0B +1\.5 s.*two +- +failed +- +0B +2\.0 s +no"
        self.assertThat(done.output, MatchesRegex(lines))
        self.assertThat(done.output, Contains("first has sent 3M by tree to 1 hosts"))
        self.assertNotIn("it is small", done.output)
        explained = self.run_virtman("deploy", "debian", "--all", "--explain", code=1).output
        for output in (explained, self.out("deployments", "7")):
            self.assertThat(output, MatchesRegex(r"(?s).*tree was chosen: it is small.*tree +2\.5 s.*uftp +9\.0 s"))
        wanted = deploy.call_args_list[0].args[0]
        self.assertEqual(
            (["one", "two"], 2 * 86400, "auto", None),
            (
                wanted.hosts,
                wanted.keep_s,
                wanted.method,
                wanted.encrypt,
            ),
        )
        self.assertThat(self.out("deploy", "debian", "--all", "--detach"), Contains("to 2 hosts by tree"))
        for options in ((), ("--all", "--place", "rome")):
            self.run_virtman("deploy", "debian", *options, code=2)
        self.assertThat(self.out("deployments"), MatchesRegex(r"(?s)NUMBER.*7 +debian +tree +ended +2\.0 s"))
        self.run_virtman("deployments", "7", "--cancel")
        cancel.assert_called_once_with(7)
        self.run_virtman("deployments", "--cancel", code=2)
        gone = mock.Mock(side_effect=chain([VoltRefused("there is no deployment 7")], repeat(made)))
        self.patch(self.agent.stacks.volt, "deployment", gone)
        said = self.run_virtman("deploy", "debian", "--all", code=1).output
        self.assertEqual((True, False), ("no deployment 7" in said, "goes on" in said))

    def test_hosts(self) -> None:
        seen = datetime(2026, 1, 1, tzinfo=UTC)
        found = [
            Host(name="one", address="x:1", place="paris/1", state=HostState.ALIVE, last_seen=seen, whole=["a", "b"]),
            Host(name="two", address="x:2", state=HostState.LOST, last_seen=seen),
        ]
        self.patch(self.agent.stacks.volt, "hosts", lambda: found)
        self.assertThat(self.out("hosts"), MatchesRegex(r"(?s)HOST.*one +paris/1 +alive +a, b\ntwo +- +lost +-"))
        self.assertEqual(["one"], [host["name"] for host in self.json("hosts", "b")])

    def test_images(self) -> None:
        self.site.volt.offer("alpine", size=2 * MIB)
        self.site.volt.remove_image("alpine", when_unused=True)
        self.out("create", "vm", "debian")
        self.json("status")
        lines = self.out("images").splitlines()
        self.assertEqual(["IMAGE", "SIZE", "ORIGIN", "HOSTS", "HERE", "CACHED", "HERE", "STATE"], lines[0].split())
        self.assertThat(lines[1], MatchesRegex(r"alpine +2M +other +0 +- +0B +withdrawn, unverified$"))
        self.assertThat(lines[2], MatchesRegex(r"debian +1M +other +1 +host \(attached\) +1M +published, unverified$"))
        self.assertEqual([True, False], [image["withdrawn"] for image in self.json("images")])
        self.assertEqual(["alpine", "debian"], [image["name"] for image in self.json("images")])

    def test_tree(self) -> None:
        for said in ("other origin ready", ", unverified"):
            self.assertThat(self.out("tree", "debian"), Contains(said))
        self.assertEqual("other", self.json("tree", "debian")["root"]["host"])
        self.site.volt.down = True
        self.assertThat(self.fails("images"), Contains("Volt"))


class HostCommandsTest(AgentCliTest):
    def test_status(self) -> None:
        self.out("create", "vm", "debian")
        lines = self.out("status").splitlines()
        self.assertThat(
            lines[0],
            MatchesRegex(r"host here, Volt at http://\S+ connected; VMs run with tcg; \S+[A-Z] of \S+[A-Z] free$"),
        )
        self.assertEqual(["IMAGE", "ROLE", "PHASE", "SLOT", "FETCHED"], lines[1].split()[:5])
        self.assertThat(lines[2], MatchesRegex(r"debian +host +attached, unverified +1 +1M +3M +1 +other \(active\)$"))
        self.assertEqual("here", self.json("status")["host"])

    def test_status_tells_of_trouble(self) -> None:
        self.out("create", "vm", "debian")
        self.site.hold_still(self.agent)
        self.site.host.disks["stray"] = self.site.host.disks["vm"]
        self.site.host.daemon_dies("debian")
        self.site.host.disk_trouble = "no room"
        result = self.run_virtman("status")
        self.assertThat(result.stdout, Contains("attached, NOT served"))
        self.assertThat(result.stderr, Contains("stray"))
        self.assertThat(result.stderr, Contains("VMs' disks: no room\n"))

    def test_status_tells_of_a_host_that_is_suspended_and_of_threads_that_died(self) -> None:
        self.assertEqual("", self.run_virtman("status").stderr)
        self.out("suspend")
        self.site.have_a_thread_die("a test's thread", ValueError("over"))
        told = self.run_virtman("status").stderr
        self.assertThat(told, Contains("this host is suspended"))
        self.assertRegex(told, r"the agent's thread a test's thread died \d+ times, last of ValueError\('over'\); it ")

    def test_gc(self) -> None:
        self.out("create", "vm", "debian")
        self.out("destroy", "vm")
        self.assertEqual("would free 1M and remove 1 stacks: debian\n", self.out("gc", "--dry-run"))
        self.assertEqual(
            {"stacks": ["debian"], "freed_bytes": BYTES_PER_FETCH, "kept": []}, self.json("gc", "--dry-run")
        )
        self.assertEqual("removed 1 stacks, freed 1M\n", self.out("gc"))
        self.assertEqual("would free 0B and remove 0 stacks\n", self.out("gc", "--dry-run"))
        self.assertEqual({"stacks": [], "freed_bytes": 0, "kept": []}, self.json("gc"))

    def test_repair(self) -> None:
        self.out("create", "vm", "debian")
        self.site.hold_still(self.agent)
        self.site.host.daemon_dies("debian")
        self.assertEqual("images: debian; orphans: nothing to do; vms: nothing to do\n", self.out("repair"))
        self.assertEqual({"vms": [], "images": [], "orphans": [], "devices": []}, self.json("repair"))

    def test_suspend(self) -> None:
        self.out("boot", "vm", "debian", *BOOT)
        self.assertThat(self.fails("suspend"), Contains("--force"))
        self.assertEqual({"suspended": True}, self.json("suspend", "--force"))
        self.assertEqual({}, self.site.host.served)
        self.assertEqual("", self.out("suspend", "--force"))

    def test_accel(self) -> None:
        kernel, program = self.socket.parent / "vmlinuz", self.socket.parent / QEMU
        kernel.touch()
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
        self.enterContext(mock.patch.dict(os.environ, PATH=f"{program.parent}:/usr/bin:/bin"))
        self.assertEqual("tcg", self.json("accel", "--kernel", kernel)["accel"])
        self.assertThat(self.out("accel", "--kernel", kernel), MatchesRegex(r"tcg: .+\n$"))
        self.misused("accel", "--kernel", "/nonexistent")


class CacheCommandsTest(AgentCliTest):
    cache = "group"

    def test_list(self) -> None:
        images = ["alpine", "debian"]
        running = POOL.model_copy(update={"images": images, "state": VolumeState.RUNNING})
        self.site.host.volumes[Path(POOL.path)] = running
        self.run_virtman("cache", "add", "/srv/[b] :smile:")
        lines = self.out("cache", "list").splitlines()
        self.assertEqual(["PATH", "SIZE", "STATE", "IMAGES"], lines[0].split())
        self.assertThat(lines[1], MatchesRegex(r"/state/cache/pool +1G +running +alpine, debian$"))
        self.assertThat(lines[2], MatchesRegex(r"/srv/\[b\] :smile: +1G +idle +-$"))
        self.assertEqual(images, self.json("cache", "list")[0]["images"])

    def test_volumes_come_and_go_by_paths_that_may_be_relative(self) -> None:
        self.addCleanup(os.chdir, Path.cwd())
        os.chdir(self.socket.parent)
        volume = self.socket.parent / "volume"
        for _ in range(2):
            self.assertEqual(f"{volume}: 1G, idle\n", self.out("cache", "add", "volume"))
        self.assertEqual({Path(POOL.path), volume}, set(self.site.host.volumes))
        self.assertEqual("", self.out("cache", "remove", POOL.path))
        self.assertEqual({"removed": str(volume)}, self.json("cache", "remove", "volume"))
        self.assertEqual({}, self.site.host.volumes)
        self.assertThat(self.run_virtman("cache", "remove", "/dev/sdx", code=3).stderr, Contains("'/dev/sdx'"))


class DeviceCommandsTest(AgentCliTest):
    cache = "group"

    def setUp(self) -> None:
        super().setUp()
        self.device = some_device(self)

    def attach(self) -> str:
        return self.out("cache", "attach", self.device).removesuffix("\n")

    def test_attached_ones_are_listed_and_the_path_alone_is_printed(self) -> None:
        path = self.attach()
        self.assertThat(path, MatchesRegex(r"/dev/mapper/virtman-volume-[0-9a-f]{16}$"))
        self.assertEqual(path, self.json("cache", "attach", self.device)["path"])
        for command in (("cache", "list"), ("cache", "devices"), ("status",)):
            (line,) = (line for line in self.out(*command).splitlines() if path in line)
            self.assertEqual([str(self.device), path, "1G", "cached", "0", "0", "0B"], line.split())
        self.assertEqual([path], [device["path"] for device in self.json("cache", "devices")])

    def test_detach(self) -> None:
        for handed_out in (False, True):
            path = self.attach()
            self.assertEqual("", self.out("cache", "detach", path if handed_out else self.device))
            self.assertEqual([], self.json("cache", "devices"))
        self.assertEqual({"detached": str(self.device)}, self.json("cache", "detach", self.device))
        path = self.attach()
        self.site.host.open_devices |= set(self.site.host.devices)
        self.assertThat(self.fails("cache", "detach", path), Contains("or use --force"))
        self.out("cache", "detach", path, "--force")
        self.assertEqual([], self.json("cache", "devices"))


class NoVolumesTest(AgentCliTest):
    def test_a_command_about_the_cache_names_the_driver(self) -> None:
        for command in (("list",), ("devices",), ("attach", some_device(self))):
            self.assertThat(self.fails("cache", *command), MatchesRegex(r".*double.*; .*bcache"))


class NoAgentTest(CliTest):
    def test_a_command_fails_in_one_line_that_names_the_socket(self) -> None:
        for command in (("list",), ("create", "vm", "debian"), ("publish", "x", __file__), ("cache", "list")):
            self.assertThat(self.fails(*command), MatchesRegex(f".*{self.socket}.*virtman agent"))


class UsageTest(CliTest):
    def commands(self, group: click.Group = main) -> Iterator[tuple[tuple[str, ...], click.Command]]:
        """All commands by their names, after the names of the groups that they are in."""
        context = click.Context(group)
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None
            yield (name,), command
            if isinstance(command, click.Group):
                yield from (((name, *names), child) for names, child in self.commands(command))

    def test_every_command_explains_itself(self) -> None:
        for names, command in self.commands():
            self.assertThat(self.out(*names, "--help"), Contains(f" {' '.join(names)} "))
            self.assertTrue(command.help)

    def test_every_command_but_the_agent_prints_json_for_scripts(self) -> None:
        for names, command in self.commands():
            has = any("--json" in option.opts for option in command.params)
            self.assertEqual(names != ("agent",) and not isinstance(command, click.Group), has, " ".join(names))

    def test_misuse_ends_with_2(self) -> None:
        for arguments in (
            ("create",), ("create", "vm"), ("create", "a", "b", "c"), ("explode",), ("list", "--x"), ("cache", "add"),
        ):  # fmt: skip
            self.misused(*arguments)

    def test_help_cuts_nothing_off(self) -> None:
        for names in ((), ("cache",), ("snapshot",)):
            commands = self.out(*names, "--help").partition("Commands:")[2]
            self.assertIn("list ", commands)
            self.assertNotIn("...", commands)


class DoctorCommandTest(CliTest):
    def doctor(self, *arguments: object, path: str | None = None) -> Result:
        """Run it without an agent, and with other programs than there are if ``path`` says so."""
        state = self.socket.parent / "state"
        environment = {"PATH": path} if path else {}
        asked = ["doctor", "--state", state, "--libvirt", LIBVIRT, *arguments]
        return CliRunner().invoke(main, [*map(str, asked)], env=environment)

    def tools(self, *names: str) -> str:
        """A folder with these programs only."""
        folder = self.socket.parent / "bin"
        folder.mkdir()
        for name in names:
            (folder / name).touch(0o755)
        return str(folder)

    def test_a_stack_that_can_run_ends_with_0(self) -> None:
        path = self.tools("qemu-img", "qemu-storage-daemon", "setpriv")
        for stack in ("auto", "chunkstore"):
            result = self.doctor("--stack", stack, path=path)
            self.assertEqual((0, ""), (result.exit_code, result.stderr), result.output)
            self.assertThat(result.stdout, Contains(f"libvirt at {LIBVIRT} answers"))
        self.assertFalse((self.socket.parent / "state").exists(), "the doctor changes nothing")

    def test_for_scripts(self) -> None:
        result = self.doctor("--stack", "chunkstore", "--json", path=self.tools("qemu-img", "setpriv"))
        answer = json.loads(result.stdout)
        self.assertEqual((1, False), (result.exit_code, answer["runs"]))
        self.assertEqual("apt-get install qemu-system-common", answer["install"])
        self.assertEqual({"uri": LIBVIRT, "trouble": None}, answer["libvirt"])

    def test_on_a_terminal_of_80_columns_nothing_is_cut_off(self) -> None:
        shown = self.on_terminal(80, "doctor", "--state", str(self.socket.parent / "state"), "--libvirt", LIBVIRT)
        self.assertNotIn("…", shown)
        table, _, advice = shown.partition("\n\n")
        self.assertLessEqual(max(map(len, table.splitlines())), 80)
        for word in ("STACK", "kernel", "chunkstore", "iscsi", "bcache", "iscsi_tcp", "qemu-storage-daemon"):
            self.assertIn(word, table)
        self.assertIn("--stack auto takes", advice)

    def on_terminal(self, columns: int, *arguments: str) -> str:
        """What a person sees, without colours."""
        command = shlex.join([sys.executable, "-m", "virtman.cli", *arguments])
        environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | {"TERM": "xterm"}
        # script(1) gives it a terminal of its own.
        argv = ["script", "--quiet", "--command", f"stty cols {columns}; {command}", "/dev/null"]
        said = subprocess.run(argv, env=environment, stdin=DEVNULL, capture_output=True, text=True, check=False).stdout
        return re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", said).replace("\r\n", "\n")


class AgentCommandTest(CliTest):
    def agent(self, *arguments: object) -> str:
        folder = self.socket.parent
        return self.fails("agent", "--state", folder / "state", "--run", folder / "run", "--accel", "tcg", *arguments)

    def test_what_no_agent_can_run_with_fails_in_one_line(self) -> None:
        for said, *settings in (
            ("--name", "--name", "a.b"),
            ("too long", "--name", "here", "--run", "/tmp/" + "x" * 100),
            ("/nonexistent", "--name", "here", "--volt-token-file", "/nonexistent"),
            ("driver imaginary", "--name", "here", "--stack", "kernel", "--cache", "imaginary"),
        ):
            self.assertThat(self.agent(*settings), Contains(said))

    def test_settings_that_cannot_be_are_misuse(self) -> None:
        for wrong in (
            ("--accel", "xen"),
            ("--stack", "other"),
            ("--address", "here"),
            ("--port", "70000"),
            ("--up", "0"),
            ("--path-policy", "any"),
            ("--idle-grace", "-1"),
            ("--log-level", "loud"),
        ):
            self.misused("agent", *wrong)
