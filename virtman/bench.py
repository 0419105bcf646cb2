"""Staged timings of what really happens: VMs that boot on this host, and an image that goes to many hosts."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from drivers.host.retry import until
from virtman.client import AgentClient, OnProgress
from virtman.errors import HypervisorError, Interrupted, UnknownVm, VirtmanError
from virtman.parallel import side_by_side
from virtman.staging import Round, Run
from volt.deploymodels import Deployment, DeploymentHost, TransferState

PAUSE = 0.02
"""Seconds between two looks at a console."""
LOOK = 0.2
"""Seconds between two looks at a deployment. Hosts tell Volt of themselves at their heartbeats, which are rarer."""


@dataclass(frozen=True)
class Boots:
    """The VMs of a wave. ``how``: as for ``AgentClient.boot``.

    ``message``: what a VM's console shows when the VM is up; without it a VM is up when libvirt says that it runs.
    ``timeout``: seconds until the message.
    """

    image: str
    count: int
    how: Mapping[str, Any]
    message: str
    timeout: float


class _Watch:
    """The seconds of one VM's stages. ``stopped``: the wave is to end."""

    def __init__(self, begun: float, stopped: threading.Event) -> None:
        self._last, self._stopped = begun, stopped
        self.seconds: dict[str, float] = {}

    def end(self, stage: str) -> None:
        """A stage has ended now. Raises Interrupted."""
        now = time.monotonic()
        self.seconds[stage], self._last = now - self._last, now
        self.check()

    def check(self) -> None:
        """Raises Interrupted."""
        if self._stopped.is_set():
            raise Interrupted("the benchmark was ended")


def wave(client: AgentClient, boots: Boots, parallel: int) -> Round:
    """Boot VMs, ``parallel`` at a time. All run until the last one is up, and are destroyed then, whatever happens.

    Raises VirtmanError for VMs that could not be destroyed.
    """
    names = [f"bench-{secrets.token_hex(4)}-{number}" for number in range(1, boots.count + 1)]
    stopped = threading.Event()
    pool = ThreadPoolExecutor(parallel, thread_name_prefix="bench")
    with ExitStack() as stack:
        stack.callback(_destroy, client, names)
        # A call that is under way ends first: it would make its VM after that was destroyed.
        stack.callback(pool.shutdown, cancel_futures=True)
        stack.callback(stopped.set)
        begun = time.monotonic()
        runs = [pool.submit(_boot, client, boots, name, _Watch(begun, stopped)) for name in names]
        return Round(label=f"{parallel} at a time", runs=[run.result() for run in runs])


def _boot(client: AgentClient, boots: Boots, vm: str, watch: _Watch) -> Run:
    try:
        watch.end("pending")
        client.create(vm, boots.image)
        watch.end("disk")
        booted = client.boot(vm, boots.image, **boots.how)
        watch.end("start")
        if booted.machine.state != "running":
            _await_running(client, vm, boots.timeout, watch)
        watch.end("running")
        if boots.message:
            _await_message(Path(booted.machine.console_log), vm, boots, watch)
    except VirtmanError as error:
        return Run(name=vm, seconds=watch.seconds, error=str(error))
    return Run(name=vm, seconds=watch.seconds)


def _await_running(client: AgentClient, vm: str, timeout: float, watch: _Watch) -> None:
    def runs() -> bool:
        watch.check()
        return client.vm(vm).state == "running"

    if not until(runs, limit=timeout, first=PAUSE, longest=PAUSE):
        raise HypervisorError(f"vm {vm!r} is {client.vm(vm).state} after {timeout:g} s")


def _await_message(log: Path, vm: str, boots: Boots, watch: _Watch) -> None:
    message, seen = boots.message.encode(), b""
    try:
        with log.open("rb", buffering=0) as file:

            def shown() -> bool:
                nonlocal seen
                watch.check()
                new = file.read()
                if new and "console" not in watch.seconds:
                    watch.end("console")
                seen = seen[-len(message) :] + new
                return message in seen

            if until(shown, limit=boots.timeout, first=PAUSE, longest=PAUSE):
                watch.end("guest")
                return
    except OSError as error:
        raise HypervisorError(f"the console of vm {vm!r} cannot be read: {error}") from error
    said = "something else" if "console" in watch.seconds else "nothing"
    raise HypervisorError(
        f"the console of vm {vm!r} showed {said}, and not {boots.message!r}, within {boots.timeout:g} s; say with"
        " --message what it shows, or --message '' if the image has no serial console"
    )


def _destroy(client: AgentClient, names: Sequence[str]) -> None:
    def destroy(vm: str) -> None:
        with suppress(UnknownVm):
            client.destroy(vm)

    if failed := side_by_side([partial(destroy, name) for name in names]):
        prefix = names[0].rpartition("-")[0]
        raise VirtmanError(f"VMs {prefix}-… are left, see virtman list, and use virtman destroy: {failed[0]}")


def follow(
    client: AgentClient, number: int, had: Collection[str], show: OnProgress, say: Callable[[str], None]
) -> tuple[Deployment, list[Run]]:
    """Wait until a deployment has ended. Returns that, and the runs of the hosts that ``had`` not all of the image."""
    seen: dict[str, _Seen] = {}

    def look(now: Deployment) -> None:
        for host in now.hosts:
            seen.setdefault(host.host, _Seen()).note(now, host)

    last = client.follow_deployment(number, show, look, LOOK, say)
    return last, [seen.get(host.host, _Seen()).run(host, last.seconds) for host in last.hosts if host.host not in had]


class _Seen:
    """When a host of a deployment was first seen in each state, in Volt's seconds.

    What was shorter than a look, or than the time between two heartbeats, is not seen.
    """

    def __init__(self) -> None:
        self._states: dict[TransferState, float] = {}
        self._there: float | None = None

    def note(self, now: Deployment, host: DeploymentHost) -> None:
        """A look at the deployment has shown the host so."""
        # What "auto" fills to try the network comes before what it then chooses.
        trying = host.state is TransferState.FILLING and now.method == "auto"
        state = TransferState.READY if trying else host.state
        if state is TransferState.READY:
            self._states.pop(TransferState.FILLING, None)
        self._states.setdefault(state, now.seconds)
        if self._there is None and host.total:
            self._there = host.done / host.total

    def run(self, host: DeploymentHost, last: float) -> Run:
        """The seconds of the stages. ``last``: when the deployment ended."""
        end = last if host.seconds is None else host.seconds
        filling = min(end, self._states.get(TransferState.FILLING, end))
        heard = min(filling, self._states.get(TransferState.READY, filling))
        return Run(
            name=host.host, seconds={"waiting": heard, "ready": filling - heard, "filling": end - filling},
            there=self._there or 0.0, error="" if host.state == "whole" else host.error or str(host.state),
        )  # fmt: skip
