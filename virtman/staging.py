"""What staged timings tell: how long each stage took, what cost most, and which setting is behind it.

The stages of a boot are those of Razavi et al., "Scaling VM deployment in an open source cloud stack" (ScienceCloud
2015): pending, prolog (disk), boot (start), running, and the first message from inside the guest.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Literal, NamedTuple

from pydantic import BaseModel

from virtman.errors import BadRequest
from volt.deploymodels import DeploymentLeg


class Stage(NamedTuple):
    """A part of the time. ``setting``: what an administrator can change about it. ``waits``: nothing is done in it."""

    name: str
    meaning: str
    setting: str
    waits: bool = False


STAGES = {
    "boot": (
        Stage("pending", "waits for its turn", "--parallel, or how many VMs your cloud starts at a time", waits=True),
        Stage("disk", "image attached, VM's disk made", "virtman hydrate IMAGE, which keeps the image attached"),
        Stage("start", "libvirt defines and starts the VM", "fewer VMs at a time, less --memory"),
        Stage("running", "until libvirt says that it runs", "fewer VMs at a time"),
        Stage("console", "firmware and boot loader", "the boot loader's timeout; without KVM: virtman accel"),
        Stage(
            "guest", "kernel and services, until the message",
            "--cpus and the image's services; of an image read for the first time: virtman deploy IMAGE",
        ),
    ),
    "deploy": (
        Stage("waiting", "until Volt heard that it has the image's stack", "volt serve --heartbeat"),
        Stage(
            "ready", "waits for its turn, or auto tries the network", "--method; --parallel of unicast", waits=True
        ),
        Stage("filling", "reads until the image is whole", "--method, --limit; virtman agent --up and --down"),
    ),
}  # fmt: skip
"""The stages of each kind of timing, in their order."""


class Run(BaseModel):
    """One VM or host: seconds by stage. ``error``: why it did not get through all stages.

    ``there``: the part of the image that a host had when Volt heard of it first.
    """

    name: str
    seconds: dict[str, float] = {}
    there: float = 0.0
    error: str = ""

    @property
    def total(self) -> float:
        """Seconds from the begin of the round to the end of the run."""
        return sum(self.seconds.values())


class Round(BaseModel):
    """Runs that began together. ``label``: what differs from other rounds, the number of VMs at a time say."""

    label: str
    runs: list[Run]

    @property
    def good(self) -> list[Run]:
        """The runs that got through all stages."""
        return [run for run in self.runs if not run.error]

    @property
    def seconds(self) -> float:
        """Until the last run was through."""
        return max((run.total for run in self.good), default=0.0)


class Result(BaseModel):
    """All that one call measured, as in result.json. ``legs``: what hosts sent that send to several at once."""

    kind: Literal["boot", "deploy"]
    image: str
    host: str
    begun: datetime
    rounds: list[Round]
    legs: list[DeploymentLeg] = []
    notes: list[str] = []
    cost_most: str = ""


class Figures(NamedTuple):
    """Seconds of one stage over all runs; ``share`` of the time of all stages. By nearest rank."""

    stage: Stage
    median: float
    p90: float
    longest: float
    share: float


def figures(kind: str, runs: Sequence[Run]) -> list[Figures]:
    """The figures of each stage; none without runs."""
    if not runs:
        return []
    whole = sum(run.total for run in runs) or 1.0
    found = []
    for stage in STAGES[kind]:
        values = sorted(run.seconds.get(stage.name, 0.0) for run in runs)
        found.append(Figures(stage, _rank(values, 50), _rank(values, 90), values[-1], sum(values) / whole))
    return found


def _rank(ordered: Sequence[float], percent: int) -> float:
    """The smallest value that at least ``percent`` % of the values do not exceed."""
    return ordered[max(1, -(-len(ordered) * percent // 100)) - 1]


def fastest(rounds: Sequence[Round]) -> Round | None:
    """The round that was over first, of those in which nothing failed; else of those in which not all failed."""
    able = [each for each in rounds if each.good]
    return min(able, key=lambda each: (len(each.good) < len(each.runs), each.seconds), default=None)


def cost_most(result: Result) -> str:
    """What cost most in the fastest round, as a sentence; empty if nothing got through.

    Waits grow with the number of runs and hide the work, so the work that cost most is named as well.
    """
    best = fastest(result.rounds)
    if best is None:
        return ""
    found = figures(result.kind, best.good)
    top = max(found, key=lambda each: each.share)
    said = f"what cost most: {_named(top)}"
    if top.stage.waits:
        work = max((each for each in found if not each.stage.waits), key=lambda each: each.share)
        said += f"; of the work: {_named(work)}"
    return said


def _named(one: Figures) -> str:
    return f"{one.stage.name}, {one.share:.0%} of the time (its setting: {one.stage.setting})"


def merged(results: Sequence[Result]) -> Result:
    """The results of several hosts or methods as one. Rounds with the same label become one. Raises BadRequest."""
    if len({one.kind for one in results}) != 1:
        raise BadRequest("these are timings of boots and of deployments; report each kind by itself")
    rounds: dict[str, list[Run]] = {}
    for one in results:
        for each in one.rounds:
            prefix = f"{one.host}: " if one.kind == "boot" else ""
            runs = [run.model_copy(update={"name": prefix + run.name}) for run in each.runs]
            rounds.setdefault(each.label, []).extend(runs)
    made = Result(
        kind=results[0].kind,
        image=", ".join(sorted({one.image for one in results})),
        host=", ".join(dict.fromkeys(one.host for one in results)),
        begun=min(one.begun for one in results),
        rounds=[Round(label=label, runs=runs) for label, runs in rounds.items()],
        legs=[leg for one in results for leg in one.legs],
        notes=list(dict.fromkeys(f"{one.host}: {note}" for one in results for note in one.notes)),
    )
    return made.model_copy(update={"cost_most": cost_most(made)})
