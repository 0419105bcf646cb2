"""Whether KVM works, with programs that behave like a QEMU."""

from __future__ import annotations

import json
import os
from pathlib import Path
from unittest import mock

from testtools import TestCase
from testtools.matchers import Contains

from tests.unit.virtman.scene import folder_for
from virtman.accel import QEMU, choose_accel, newest_kernel, prove_kvm
from virtman.models import Accel

BOOTS = "echo 'Linux version 6.1 (gcc)'; exec sleep 60"
ENDS = "echo 'could not access KVM kernel module'"
SILENT = "exec sleep 3600"
NEVER = 3600.0


class AccelTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = folder_for(self)
        self.kernel = self.folder / "vmlinuz"
        self.device = self.folder / "kvm"
        self.memory = self.folder / "accel.json"
        for file in (self.kernel, self.device):
            file.touch()

    def qemu(self, script: str) -> Path:
        """Put a program in QEMU's place in PATH; it writes its arguments down. Returns where."""
        bin_folder = self.folder / "bin"
        bin_folder.mkdir(exist_ok=True)
        program, ran = bin_folder / QEMU, self.folder / "ran"
        program.write_text(f'#!/bin/sh\necho "$@" >> {ran}\n{script}\n')
        program.chmod(0o755)
        self.path(f"{bin_folder}:/usr/bin:/bin")
        return ran

    def path(self, value: str) -> None:
        self.enterContext(mock.patch.dict(os.environ, PATH=value))

    def choose(self) -> Accel:
        return choose_accel(self.kernel, self.memory, self.device)


class ProveTest(AccelTest):
    def test_the_banner_proves_it(self) -> None:
        ran = self.qemu(BOOTS)
        self.assertEqual(Accel(use="kvm", reason="vmlinuz booted with it"), prove_kvm(self.kernel))
        self.assertThat(ran.read_text(), Contains("-accel kvm -m 256 -nodefaults -display none -no-reboot"))
        self.assertThat(ran.read_text(), Contains(f"-kernel {self.kernel}"))

    def test_silence_is_given_up_after_the_limit(self) -> None:
        self.qemu(SILENT)
        found = prove_kvm(self.kernel, time_limit=0.2)
        self.assertEqual("tcg", found.use)
        self.assertThat(found.reason, Contains("did not boot with KVM"))

    def test_an_early_end_is_not_waited_for(self) -> None:
        self.qemu(ENDS)
        self.assertEqual("tcg", prove_kvm(self.kernel, time_limit=NEVER).use)

    def test_no_qemu_is_told(self) -> None:
        self.path(str(self.folder))
        found = prove_kvm(self.kernel)
        self.assertEqual("tcg", found.use)
        self.assertThat(found.reason, Contains("cannot run qemu-system-x86_64"))


class ChooseTest(AccelTest):
    def test_without_the_device_nothing_is_tried(self) -> None:
        ran = self.qemu(BOOTS)
        self.device.unlink()
        found = self.choose()
        self.assertEqual("tcg", found.use)
        self.assertThat(found.reason, Contains(str(self.device)))
        self.assertFalse(ran.exists())
        self.assertFalse(self.memory.exists())

    def test_the_answer_is_remembered(self) -> None:
        ran = self.qemu(BOOTS)
        self.assertEqual(self.choose(), self.choose())
        self.assertEqual(1, ran.read_text().count("-kernel"))

    def test_an_answer_from_before_a_reboot_counts_no_more(self) -> None:
        self.qemu(ENDS)
        self.choose()
        note = json.loads(self.memory.read_text()) | {"boot_id": "another"}
        self.memory.write_text(json.dumps(note))
        self.qemu(BOOTS)
        self.assertEqual("kvm", self.choose().use)


class NewestKernelTest(AccelTest):
    def test_the_one_installed_last_is_taken(self) -> None:
        for age, name in enumerate(("vmlinuz-6.2", "vmlinuz-6.10", "vmlinuz-6.9")):
            (self.folder / name).touch()
            os.utime(self.folder / name, (age + 1, age + 1))
        os.utime(self.kernel, (0, 0))
        self.assertEqual(self.folder / "vmlinuz-6.9", newest_kernel(self.folder))

    def test_there_may_be_none(self) -> None:
        self.assertIsNone(newest_kernel(self.folder / "bin"))
        self.kernel.unlink()
        self.assertIsNone(newest_kernel(self.folder))
