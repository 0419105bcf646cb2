"""How long a VM stands still, and what goes over the wire, when it moves to another host under verified load.

One VM with private data moves between two hosts, each with a libvirt of its own, there and back again, while fio in
its guest writes blocks with checksums and reads them back from the disk. The same disk as a stream that is sent and
received with the VM off is what a move without ``virtman migrate`` takes: the least that its user would miss it for.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
import libvirt

from benchmarks.attach import timed
from benchmarks.command import SETTINGS, benchmark, finish
from benchmarks.errors import Failed, TookTooLong
from benchmarks.figures import MIB, print_table, spread
from benchmarks.processes import say, tool
from lab.cluster import Cluster, proven_accel
from lab.cluster import tool as virtman
from lab.console import Console
from lab.guest import guest
from lab.libvirt import PrivateLibvirt
from lab.login import io_errors, wait_login
from lab.tools import BUILD, run
from virtman.client import AgentClient
from virtman.moving import Destination, Migration

IMAGE, VM, TOOLS = "guest", "vm", "tools"
PRIVATE_BYTES = 200 * MIB
LOGIN_TIMEOUT, ANSWER_TIMEOUT, EVENT_TIMEOUT = 600.0, 1200.0, 60.0
DOWNTIME_BAR_S, BYTES_BAR = 1.0, 1.2
FIO = "--filename=/root/load --size=32m --rw=randwrite --bsrange=4k-64k --direct=1 --verify=crc32c --verify_fatal=1"
LOAD = """\
# One pass writes all blocks, and then reads and verifies them.
while [ ! -e /run/enough ]; do
  /root/fio/run --name=load {fio} {rate} > /run/fio.log 2>&1 || cp /run/fio.log /run/bad
  echo pass >> /run/passes
done
echo done > /run/ended
"""


class Watch:
    """When VMs stood still and went on, as the two libvirts tell of it. A context manager."""

    def __init__(self, uris: Sequence[str]) -> None:
        self._uris = uris
        self._connections: list[libvirt.virConnect] = []
        self._seen: list[tuple[float, int, int]] = []
        self._changed = threading.Condition()

    def __enter__(self) -> Watch:
        """Begin."""
        libvirt.virEventRegisterDefaultImpl()
        threading.Thread(target=_turn, name="libvirt events", daemon=True).start()
        for number, uri in enumerate(self._uris):
            connection = libvirt.open(uri)
            kind = libvirt.VIR_DOMAIN_EVENT_ID_LIFECYCLE
            connection.domainEventRegisterAny(None, kind, self._heard, number)
            self._connections.append(connection)
        return self

    def __exit__(self, *_: object) -> None:
        """End."""
        for connection in self._connections:
            connection.close()

    def _heard(self, _connection: object, _domain: object, event: int, _detail: int, host: int) -> None:
        with self._changed:
            self._seen.append((time.monotonic(), host, event))
            self._changed.notify_all()

    def stood_still(self, there: int, since: float) -> float:
        """Seconds from when the VM stopped at the other host to when it went on ``there``. Raises TookTooLong."""

        def first(host: int, event: int) -> float | None:
            return next((at for at, where, what in self._seen if (where, what) == (host, event) and at > since), None)

        def both() -> tuple[float, float] | None:
            stopped = first(1 - there, libvirt.VIR_DOMAIN_EVENT_SUSPENDED)
            went_on = first(there, libvirt.VIR_DOMAIN_EVENT_RESUMED)
            return None if stopped is None or went_on is None else (stopped, went_on)

        with self._changed:
            found = self._changed.wait_for(both, EVENT_TIMEOUT)
        if found is None:
            raise TookTooLong("libvirt did not tell when the VM stopped and went on")
        return found[1] - found[0]


def _turn() -> None:
    while True:
        libvirt.virEventRunDefaultImpl()


def private_bytes(agent: AgentClient) -> int:
    """Bytes of disk space of all that the VM's disk holds besides its image."""
    folder = Path(agent.vm(VM).disk.path).parent
    files = [path.stat() for path in folder.iterdir() if path.is_file()]
    return sum({file.st_ino: file.st_blocks * 512 for file in files}.values())  # some have several names


def tools_disk(folder: Path) -> Path:
    """A filesystem with fio and what it is linked with, for a guest of the same release."""
    root = folder / "root"
    root.mkdir()
    fio = tool("fio")
    linked = [word for word in run(["ldd", fio]).split() if word.startswith("/")]
    for path in (fio, *linked):
        shutil.copy(path, root)
    loader = next(Path(path).name for path in linked if "ld-linux" in path)
    (root / "run").write_text(f'#!/bin/sh\nexec /root/fio/{loader} --library-path /root/fio /root/fio/fio "$@"\n')
    (root / "run").chmod(0o755)
    disk = folder / "tools.raw"
    run(["mke2fs", "-q", "-t", "ext4", "-d", root, disk, "96m"])
    return disk


def put_fio(agent: AgentClient, console: Console, folder: Path) -> None:
    """Have fio in the guest: a disk comes, is copied from, and goes."""
    agent.publish(TOOLS, tools_disk(folder))
    agent.create(TOOLS, TOOLS)
    agent.attach_disk(VM, TOOLS)
    device = f"/dev/disk/by-id/scsi-0QEMU_QEMU_HARDDISK_{TOOLS}"
    console.run(f"until [ -e {device} ]; do sleep 0.1; done; mkdir /run/tools /root/fio")
    console.run(f"mount -o ro {device} /run/tools && cp -a /run/tools/. /root/fio && umount /run/tools")
    agent.detach_disk(VM, TOOLS)
    agent.destroy(TOOLS)


def begin_load(console: Console, rate: str) -> None:
    """Have fio work in the guest; a whole pass is over when this returns."""
    script = LOAD.format(fio=FIO, rate=f"--rate=,{rate}")
    console.run("rm -f /run/enough /run/ended /run/passes")
    console.run(f"cat > /run/load <<'END'\n{script}END")
    console.run("sh /run/load < /dev/null > /dev/null 2>&1 &")
    console.run("until [ -s /run/passes ] || [ -e /run/bad ]; do sleep 0.2; done")


def end_load(console: Console) -> None:
    """Have fio end its pass, and look at all data. Raises Failed if it ever saw an error or a wrong byte."""
    console.run("touch /run/enough; until [ -e /run/ended ]; do sleep 0.2; done")
    console.run("echo 3 > /proc/sys/vm/drop_caches; md5sum -c --status /run/sum || echo 'other data' > /run/bad")
    bad = console.run("cat /run/bad 2> /dev/null || true")
    if bad:
        raise Failed(f"fio saw an error in the guest: {bad[-500:]}")


def move(cluster: Cluster, uris: Sequence[str], there: int, watch: Watch) -> dict[str, float]:
    """Move the VM there. Returns what it took."""
    here = cluster.agents[1 - there]
    destination = Destination([str(virtman("virtman")), "--socket", str(cluster.socket(there))])
    private, began = private_bytes(here), time.monotonic()
    moved = Migration(here, destination, VM, uris[there], lambda *_: None).run()
    return {
        "seconds": time.monotonic() - began, "downtime": moved.downtime, "private": private, "sent": moved.sent,
        "stood_still": watch.stood_still(there, began), "sent_ratio": moved.sent / private,
    }  # fmt: skip


def off(cluster: Cluster, folder: Path) -> float:
    """Seconds to send and to receive the disk as it is, which is what a VM that is off would have to wait for."""
    stream = folder / "stream"
    with stream.open("wb") as file:
        seconds = timed(cluster.agents[0].send, VM, file)
    with stream.open("rb") as file:
        seconds += timed(cluster.agents[1].receive, "copy", IMAGE, file)
    stream.unlink()
    cluster.agents[1].destroy("copy")
    return seconds


def measure(moves: int, rates: Sequence[str], memory: int) -> dict[str, Any]:
    """All moves under each load."""
    made, folder = guest(), BUILD / "migrate"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    accel = proven_accel(made.kernel)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        libvirts = [stack.enter_context(PrivateLibvirt(folder / f"libvirt-{host}")) for host in (0, 1)]
        uris = [one.uri for one in libvirts]
        cluster = stack.enter_context(Cluster(folder, 2, libvirt=uris, accel=accel))
        watch = stack.enter_context(Watch(uris))
        console = _vm_with_data(cluster, uris[0], made.disk, scratch, memory)
        figures: dict[str, Any] = {"accel": accel, "memory_mib": memory, "off_s": off(cluster, scratch), "loads": {}}
        for rate in rates:
            begin_load(console, rate)
            took = []
            for number in range(2 * moves):
                there = 1 - number % 2
                took.append(move(cluster, uris, there, watch))
                say(f"{rate}: " + ", ".join(f"{what} {value:.2f}" for what, value in took[-1].items()))
                console.close()
                console = Console.of_shell(uris[there], VM, ANSWER_TIMEOUT)
            end_load(console)
            figures["loads"][rate] = {what: spread([one[what] for one in took]) for what in took[0]}
        if errors := io_errors(_console_log(cluster.agents[0])):
            raise Failed(f"the guest saw {errors} I/O errors")
        return figures


def _vm_with_data(cluster: Cluster, uri: str, image: Path, folder: Path, memory: int) -> Console:
    agent = cluster.agents[0]
    agent.publish(IMAGE, image)
    agent.boot(VM, IMAGE, memory=memory, network="none")
    wait_login(VM, _console_log(agent), LOGIN_TIMEOUT)
    console = Console(uri, VM, ANSWER_TIMEOUT)
    put_fio(agent, console, folder)
    console.run(f"dd if=/dev/urandom of=/root/data bs=1M count={PRIVATE_BYTES // MIB} conv=fsync status=none")
    console.run("md5sum /root/data > /run/sum")
    return console


def _console_log(agent: AgentClient) -> Path:
    machine = agent.vm(VM).machine
    assert machine is not None
    return Path(machine.console_log)


@click.command(context_settings=SETTINGS)
@click.option("--moves", type=click.IntRange(min=1), default=3, show_default=True, help="There and back, each load.")
@click.option(
    "--rate", "rates", multiple=True, default=["1m", "8m"], show_default=True, help="Bytes/s that fio writes."
)
@click.option("--memory", type=click.IntRange(min=128), default=512, show_default=True, help="MiB of the VM.")
def main(moves: int, rates: tuple[str, ...], memory: int) -> None:
    """Move a VM with 200 MiB of private data to another host and back while fio verifies what it writes there.

    Writes build/migrate.json and prints a table.

    \b
    Examples:
      python -m benchmarks.migrate
      python -m benchmarks.migrate --moves 1 --rate 1m
    """
    with benchmark():
        figures = measure(moves, rates, memory)
        rows = []
        for rate, took in figures["loads"].items():
            rows += [
                [f"{rate}/s: stood still", *_of(took["stood_still"], "{:.2f} s"),
                 f"{took['stood_still']['median'] / figures['off_s']:.2f} of sending and receiving it"],
                [f"{rate}/s: as it was told", *_of(took["downtime"], "{:.2f} s"), ""],
                [f"{rate}/s: bytes sent over private bytes", *_of(took["sent_ratio"], "{:.3f}"), ""],
                [f"{rate}/s: all of the move", *_of(took["seconds"], "{:.1f} s"), ""],
            ]  # fmt: skip
        print_table(
            f"{2 * moves} moves of {memory} MiB under fio ({figures['accel']}); bars: {DOWNTIME_BAR_S:g} s still,"
            f" {BYTES_BAR} bytes sent for one of the private data",
            ["what", "min", "median", "max", "against"],
            rows,
        )
        within = {
            rate: {
                "downtime": took["stood_still"]["median"] < DOWNTIME_BAR_S,
                "bytes": took["sent_ratio"]["median"] <= BYTES_BAR,
            }
            for rate, took in figures["loads"].items()
        }
        finish("migrate", {**figures, "within_bar": within}, [])


def _of(values: dict[str, float], form: str) -> list[str]:
    return [form.format(values[which]) for which in ("min", "median", "max")]


if __name__ == "__main__":
    main()
