"""Putting a series and our modules into a Nova's tree, and taking them out.

Wherever a run is cut off, each file is as before or as after, so the next one goes on from there. Modules are there
before the first file that uses them and go after the last one, and files change in the order of the series, back in the
opposite one: Nova can be started at any moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from openstack_nova_patch.tool import disk, ours, patching, tree
from openstack_nova_patch.tool.series import Change, Series
from openstack_nova_patch.tool.tree import Form, Look, Verdict


@dataclass(frozen=True)
class Patch:
    """What is known of Nova, for one tree of it. All calls raise Refused and OSError."""

    nova: Path
    known: Sequence[Series]
    modules: Path = ours.HERE
    step: disk.Step = disk.no_step

    def look(self) -> Look:
        """What there is of it."""
        return tree.look(self.nova, self.known, self.modules)

    def apply(self) -> bool:
        """Put it in, or go on with it. Returns whether anything was to be done."""
        with disk.alone_in(self.nova):
            found = self.look()
            found.refuse_unfit()
            if found.verdict() is Verdict.APPLIED:
                return False
            new = [_file(found, change, patching.patched) for change in found.are(Form.BEFORE)]
            _drop(found.drafts())
            self._put(found, new)
            _drop(found.ours.superfluous())
            return True

    def _put(self, found: Look, new: list[disk.NewFile]) -> None:
        folders = found.ours.folders()
        missing = [folder for folder in folders if not folder.exists()]
        try:
            disk.make_folders(missing, disk.owner_of(self.nova))
            disk.put([*found.ours.stale(), *new], self.step)
        except OSError:
            for folder in reversed(missing):
                with suppress(OSError):  # some of it is in its place: the next run goes on
                    folder.rmdir()
            raise

    def revert(self) -> bool:
        """Take it out, or go on with that. Returns whether anything was to be done."""
        with disk.alone_in(self.nova):
            found = self.look()
            found.refuse_unfit()
            if found.verdict() is Verdict.NOT_APPLIED:
                return False
            new = [_file(found, change, patching.unpatched) for change in reversed(found.are(Form.AFTER))]
            _drop(found.drafts())
            disk.put(new, self.step)
            found.ours.remove(self.step)
            return True


def _file(found: Look, change: Change, make: Callable[[bytes, Series, Change], bytes]) -> disk.NewFile:
    place = change.place(found.nova)
    return disk.NewFile(place, make(place.read_bytes(), found.series, change), disk.owner_of(place))


def _drop(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
