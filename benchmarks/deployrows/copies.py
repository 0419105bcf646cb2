"""What deployments are compared with: copies of the image file, as OpenNebula makes them.

``ssh``: its transfer manager of that name copies from the front end to each host by scp(1), to all hosts at once here.
``shared``: a shared file system, from which each host copies. Here that is a bind mount, so no network limits it.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.deployrows.scenes import Figures, Net
from benchmarks.errors import Failed
from benchmarks.processes import running, tool
from lab.cluster import network_names
from lab.network import Network
from lab.process import attempts
from lab.tools import run

PORT = 22
LISTENS_WITHIN = 30.0
"""Seconds until a server has to listen."""
SERVER = f"""Port {PORT}
HostKey {{folder}}/key
AuthorizedKeysFile {{folder}}/key.pub
PidFile none
StrictModes no
UsePAM no
Subsystem sftp internal-sftp
"""
OPTIONS = ("-q", "-B", "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null")


def copies(hosts: int, net: Net, image: Path, folder: Path) -> list[Figures]:
    """All hosts get a copy of the image, by each way. Raises Failed, ToolMissing, NoNetwork."""
    names = network_names(hosts + 1)
    _, _, *receivers = names
    network = Network(names, rate=net.rate, round_trip=net.round_trip, loss=net.loss)
    with network, _ssh_servers(network, receivers, folder):
        scp = [*network.inside("origin"), tool("scp"), *OPTIONS, "-i", str(folder / "key"), str(image)]
        ssh = _timed("ssh", receivers, image, net, lambda name, to: [*scp, f"{network.address(name)}:{to}"], network)
    with _shared(image, folder) as seen:
        shared = _timed("shared", receivers, image, net, lambda _, to: ["cp", "--reflink=never", str(seen), to])
    return [ssh, shared]


def _timed(
    method: str, hosts: Sequence[str], image: Path, net: Net, argv: Callable[[str, str], Sequence[str]],
    network: Network | None = None,
) -> Figures:  # fmt: skip
    """Copy to all hosts at once. ``argv``: the command for a host, and where its copy is to be."""
    size, to = image.stat().st_size, {name: image.with_name(f"copy-{name}") for name in hosts}
    before, begun = network.sent_bytes("origin") if network else 0, time.monotonic()
    copying = {name: subprocess.Popen(argv(name, str(path))) for name, path in to.items()}
    try:
        codes = {name: process.wait() for name, process in copying.items()}
        seconds = time.monotonic() - begun
        if failed := [name for name, code in codes.items() if code or to[name].stat().st_size != size]:
            raise Failed(f"{method}: no copy at {', '.join(failed)}")
    finally:
        for process in copying.values():
            process.kill()
            process.wait()
        for path in to.values():
            path.unlink(missing_ok=True)
    sent = network.sent_bytes("origin") - before if network else 0
    return Figures(method, len(hosts), size, seconds, size * 8 / net.rate, sent, dict.fromkeys(hosts, seconds), {})


@contextmanager
def _ssh_servers(network: Network, names: Sequence[str], folder: Path) -> Iterator[None]:
    """A server at each host, and a key of its own for all."""
    run([tool("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key")])
    settings = folder / "sshd_config"
    settings.write_text(SERVER.format(folder=folder))
    Path("/run/sshd").mkdir(exist_ok=True)  # where sshd(8) locks its children in
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(running([*network.inside(name), tool("sshd"), "-D", "-f", str(settings)]))
        for name in names:
            _wait_for(network, name)
        yield


def _wait_for(network: Network, name: str) -> None:
    """Wait until a host's server listens. Raises Failed."""
    for _ in attempts(LISTENS_WITHIN):
        listening = run([*network.inside(name), "ss", "-Hltn", f"sport = :{PORT}"])
        if listening.strip():
            return
    raise Failed(f"sshd does not listen at {name} after {LISTENS_WITHIN:.0f} s")


@contextmanager
def _shared(image: Path, folder: Path) -> Iterator[Path]:
    """The image by way of a bind mount of its folder."""
    mounted = folder / "shared"
    mounted.mkdir()
    run(["mount", "--bind", str(image.parent), str(mounted)])
    try:
        yield mounted / image.name
    finally:
        run(["umount", str(mounted)])
        mounted.rmdir()
