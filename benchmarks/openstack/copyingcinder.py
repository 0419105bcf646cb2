"""The tests' Cinder, which has volumes made of the image by the process of ``filedriver``."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from benchmarks.errors import Failed
from benchmarks.figures import MIB
from benchmarks.openstack.plan import GIB_MIB, Plan
from tests.openstack.cinder import Cinder

MODULE = "benchmarks.openstack.filedriver"


class FileDriver:
    """The process, as a context manager. ``answered`` gets what it says of each volume, in a thread of this object."""

    def __init__(self, folder: Path, image: Path, plan: Plan, answered: Any) -> None:
        self._answered = answered
        self.sent = 0
        """Bytes that Glance has sent so far."""
        folder.mkdir()
        argv = [sys.executable, "-W", "ignore", "-m", MODULE, folder, image, plan.size * MIB, plan.cinder_at_once]
        with (folder / "log").open("w") as log:
            self._process = subprocess.Popen(
                [str(word) for word in argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self._reader = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> FileDriver:
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            self.__exit__()
            raise Failed("Cinder's driver cannot be set up")
        self._reader.start()
        return self

    def __exit__(self, *_error: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def make(self, volume_id: str, gib: int) -> None:
        """Ask for a volume."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"id": volume_id, "size": gib}) + "\n")
        self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            self.sent = answer["sent"]
            self._answered(answer)


def base_volume(folder: Path, image: Path, plan: Plan) -> Path:
    """The volume that servers share, made of the image as every other one. Raises Failed."""
    answers: list[dict[str, Any]] = []
    with FileDriver(folder, image, plan, answers.append) as driver:
        driver.make("00000000-0000-4000-8000-000000000000", plan.size // GIB_MIB)
    return path_in(answers[0])


def path_in(answer: dict[str, Any]) -> Path:
    """Where a volume is. Raises Failed if it could not be made."""
    if "path" not in answer:
        raise Failed(f"Cinder could not make a volume: {answer['error']}")
    return Path(answer["path"])


class CopyingCinder(Cinder):
    """``folder`` gets the volumes."""

    def __init__(self, test: Any, folder: Path, image: Path, plan: Plan) -> None:
        super().__init__(test)
        self.driver = FileDriver(folder, image, plan, self._made)
        self.errors: list[str] = []

    def _setUp(self) -> None:  # noqa: N802  fixtures calls it so
        super()._setUp()
        self._test.stub_out("nova.volume.cinder.API.create", self._counted("create"))
        self.driver.__enter__()
        self.addCleanup(self.driver.__exit__)

    def create(self, size: int, _name: str, _description: str, **_more: Any) -> dict[str, Any]:
        """A volume that is being made."""
        volume_id = self.add(Path("unmade"), base=False)
        self.volumes[volume_id].update(size=size, status="creating")
        self.driver.make(volume_id, size)
        return self.volumes[volume_id]

    def _made(self, answer: dict[str, Any]) -> None:
        with self._lock:
            volume = self.volumes[answer["id"]]
            if "path" in answer:
                volume.update(file=answer["path"], status="available")
            else:
                self.errors.append(answer["error"])
                volume["status"] = "error"
