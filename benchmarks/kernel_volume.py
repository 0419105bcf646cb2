"""Measure a volume of a storage network that is read through a host's cache against the same one without it.

Two guests of the kernel lab: one plays the storage, whose link answers late, and one is the host. In each round the
host reads and writes the volume's own device, one request of 4 KiB after the other, and then does the same by what
``virtman cache attach`` printed, once all of it was read by way of the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from benchmarks import fio
from benchmarks.command import EXPECTED, SETTINGS, benchmark, finish
from benchmarks.errors import Failed
from benchmarks.figures import MIB, print_table, spread
from benchmarks.kernellab import kernel_lab
from benchmarks.processes import say
from lab.kernel.machine import Machine
from lab.kernel.services import agent
from lab.kernel.storage import Storage

VOLUME = 64 * MIB
REQUEST = 4096
DELAY_MS = 2
KINDS: dict[str, fio.Options] = {
    "read": {"rw": "randread"},
    "write": {"rw": "randwrite"},
    "write, each flushed": {"rw": "randwrite", "fsync": 1},
}
"""What is measured, by fio's options."""

BARS: dict[str, tuple[str, float]] = {"read": ("at least", 5.0), "write": ("at most", 1.1)}
"""How many times faster warm reads are; how many times as long writes take."""


@contextmanager
def late(storage: Machine, milliseconds: int) -> Iterator[None]:
    """Within it whatever the storage sends leaves it so late. Raises CommandFailed."""
    storage.run(["tc", "qdisc", "add", "dev", "eth1", "root", "netem", "delay", f"{milliseconds}ms"])
    try:
        yield
    finally:
        storage.run(["tc", "qdisc", "del", "dev", "eth1", "root"])


def timed(host: Machine, path: Path, kind: str, requests: int, seed: int) -> float:
    """Microseconds that a request took, in the mean of so many. Raises CommandFailed, Failed."""
    options = {
        "filename": path, "bs": REQUEST, "ioengine": "libaio", "iodepth": 1,
        "number_ios": requests, "randseed": seed, **KINDS[kind],
    }  # fmt: skip
    return fio.seconds(host.run(fio.command(options))) * 1e6 / requests


def measured(host: Machine, path: Path, requests: int, seed: int) -> dict[str, float]:
    """Microseconds for each kind."""
    return {kind: timed(host, path, kind, requests, seed) for kind in KINDS}


def one_round(host: Machine, device: Path, requests: int, seed: int) -> dict[str, Any]:
    """Both ways, one after the other, with the same requests. Raises CommandFailed, Failed."""
    bare = measured(host, device, requests, seed)
    client = agent(host)
    # The path's links are the guest's: the agent there opens what it is told.
    attached = Path(host.run(["virtman", "cache", "attach", str(device)]).strip())
    host.run(["dd", f"if={attached}", "of=/dev/null", "bs=64k", "iflag=direct", "status=none"])
    cached = measured(host, attached, requests, seed)
    [found] = client.cached_devices()
    client.detach_cached(attached)
    ratios = {kind: cached[kind] / bare[kind] for kind in KINDS}
    return {"bare_us": bare, "cached_us": cached, "ratios": ratios, "hits": found.hits, "misses": found.misses}


def run(rounds: int, requests: int, delay: int, failures: list[str]) -> dict[str, Any]:
    """All rounds. One that fails is the last, and goes to ``failures``."""
    done: list[dict[str, Any]] = []
    with kernel_lab("kernel_volume", 1, [], failures) as lab:
        [host] = lab.hosts
        storage = Storage(lab.machines["origin"])
        storage.serve(VOLUME)
        try:
            with late(storage.machine, delay):
                storage.log_in(host)
                device = Path(host.run(["readlink", "--canonicalize", str(storage.device)]).strip())
                for number in range(rounds):
                    done.append(one_round(host, device, requests, number))
                    say(f"round {number + 1} of {rounds}: {round_text(done[-1])}")
        except EXPECTED as error:
            failures.append(f"after {len(done)} rounds: {error}")
        finally:
            storage.log_out(host)
            storage.withdraw()
    if not done:
        raise Failed("; ".join(failures))
    kinds = {kind: summary(done, kind) for kind in KINDS}
    return {"delay_ms": delay, "requests": requests, "kinds": kinds, "rounds": done}


def summary(rounds: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """All rounds of one kind; ``faster`` is the reciprocal of the median ratio."""
    bare, cached, ratio = (spread([each[of][kind] for each in rounds]) for of in ("bare_us", "cached_us", "ratios"))
    return {"bare_us": bare, "cached_us": cached, "ratio": ratio, "faster": 1 / ratio["median"]}


def round_text(done: dict[str, Any]) -> str:
    """One round for people."""
    return ", ".join(
        f"{kind}: {done['bare_us'][kind]:.0f} µs, cached {done['cached_us'][kind]:.0f} µs ({done['ratios'][kind]:.2f})"
        for kind in KINDS
    )


def row(kind: str, figures: dict[str, Any]) -> list[str]:
    """A row of the table."""
    bare, cached = (f"{figures[way]['median']:.0f}" for way in ("bare_us", "cached_us"))
    return [kind, bare, cached, f"{figures['ratio']['median']:.3f}"]


def missed(kinds: dict[str, Any]) -> list[str]:
    """What is not as the bars say."""
    found = []
    if kinds["read"]["faster"] < BARS["read"][1]:
        found.append(f"warm reads are {kinds['read']['faster']:.2f} times as fast; bar: {BARS['read'][1]}")
    if kinds["write"]["ratio"]["median"] > BARS["write"][1]:
        found.append(f"writes take {kinds['write']['ratio']['median']:.2f} times as long; bar: {BARS['write'][1]}")
    return found


@click.command(context_settings=SETTINGS)
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Each measures both ways.")
@click.option("--requests", type=click.IntRange(min=1), default=1000, show_default=True, help="Of each kind, each way.")
@click.option(
    "--delay", type=click.IntRange(0, 1000), default=DELAY_MS, show_default=True, help="Of the storage, in ms."
)
def main(rounds: int, requests: int, delay: int) -> None:
    """Measure reads and writes of 4 KiB of a volume through the cache, against the same volume without it.

    Writes build/kernel_volume.json and prints a table. Ends with exit code 1 if warm reads are less than 5 times as
    fast, or writes take more than 1.1 times as long.

    \b
    Examples:
      python -m benchmarks.kernel_volume               # about 10 minutes
      python -m benchmarks.kernel_volume --delay 0     # storage that is as near as the cache
    """
    with benchmark():
        failures: list[str] = []
        figures = run(rounds, requests, delay, failures)
        print_table(
            f"{rounds} rounds, {requests} requests of 4 KiB one after the other; the storage answers {delay} ms late",
            ["µs a request, median", "uncached", "cached", "cached / uncached"],
            [row(kind, each) for kind, each in figures["kinds"].items()],
        )
        failures += missed(figures["kinds"])
        finish("kernel_volume", figures, failures)


if __name__ == "__main__":
    main()
