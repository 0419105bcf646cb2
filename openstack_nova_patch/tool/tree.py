"""How much of a series is in a Nova's tree."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from openstack_nova_patch.tool import disk
from openstack_nova_patch.tool.errors import Refused, Unfit
from openstack_nova_patch.tool.ours import Ours
from openstack_nova_patch.tool.series import Change, Series


class Form(enum.Enum):
    """What a file that is to be changed holds. Each other value says what is the matter with it."""

    BEFORE = "as in Nova"
    AFTER = "as the patch makes it"
    MISSING = "is missing"
    LINK = "is a link"
    OTHER = "is neither as in Nova nor as the patch makes it"


class Verdict(enum.Enum):
    """The whole. A value is the exit code of apply --check."""

    APPLIED = 0
    NOT_APPLIED = 1
    HALF_APPLIED = 2
    UNFIT = 3


FITTING = (Form.BEFORE, Form.AFTER)


@dataclass(frozen=True)
class Look:
    """What was found of a series: the form of each of its files."""

    nova: Path
    series: Series
    forms: dict[Change, Form]
    ours: Ours

    def unfit(self) -> list[str]:
        """What does not fit, each file with what is the matter with it."""
        files = [
            f"{change.place(self.nova)} {form.value}" for change, form in self.forms.items() if form not in FITTING
        ]
        foreign = self.ours.foreign()
        return files + ([f"{foreign} is not of this patch: move it away"] if foreign else [])

    def are(self, form: Form) -> list[Change]:
        """Changes whose file has this form, in the order of the series."""
        return [change for change, present in self.forms.items() if present is form]

    def drafts(self) -> list[Path]:
        """What a run that was killed left beside files."""
        beside = [disk.draft_of(change.place(self.nova)) for change in self.forms]
        return [draft for draft in beside if draft.exists()] + self.ours.drafts()

    def verdict(self) -> Verdict:
        """The whole."""
        if self.unfit():
            return Verdict.UNFIT
        if self.drafts():
            return Verdict.HALF_APPLIED
        if not self.are(Form.BEFORE) and not self.ours.stale() and not self.ours.superfluous():
            return Verdict.APPLIED
        if not self.are(Form.AFTER) and not self.ours.present():
            return Verdict.NOT_APPLIED
        return Verdict.HALF_APPLIED

    def refuse_unfit(self) -> None:
        """Raise Unfit with all that does not fit."""
        unfit = self.unfit()
        if unfit:
            raise Unfit(f"does not fit (patch for Nova {self.series.version}): {'; '.join(unfit)}")


def look(nova: Path, known: Sequence[Series], modules: Path) -> Look:
    """At the series that fits this tree best; the version that Nova says it has does not matter. Raises Refused."""
    ours = Ours(nova, modules)
    looks = [Look(nova, series, {change: _form(change, nova) for change in series.changes}, ours) for series in known]
    if not looks:
        raise Refused("there is no patch series: get this repository anew")
    return min(reversed(looks), key=lambda found: (len(found.unfit()), -len(found.series.changes)))


def _form(change: Change, nova: Path) -> Form:
    place = change.place(nova)
    if place.is_symlink():  # to a cache that other environments share, say
        return Form.LINK
    try:
        found = disk.digest(place.read_bytes())
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return Form.MISSING
    return {change.before: Form.BEFORE, change.after: Form.AFTER}.get(found, Form.OTHER)
