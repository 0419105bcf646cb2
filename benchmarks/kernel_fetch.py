"""Count what a host of the kernel stack fetches for many VMs that read the same boot set.

Two guests of the kernel lab: an origin, and a host with the VMs. Each case starts with a host that has nothing of the
image, and counts at the host's iSCSI disks, from the login on, and at the origin's export. It is compared with what the
first VM's disk alone was asked for, which for buffered reads is more than the boot set: the kernel reads ahead.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import click

from benchmarks.command import EXPECTED, SETTINGS, benchmark, finish
from benchmarks.errors import Failed
from benchmarks.figures import MIB, print_table
from benchmarks.inside.bootset import BOOT_SET
from benchmarks.kernellab import KernelLab, kernel_lab, program
from benchmarks.processes import say
from lab.kernel.machine import Machine
from lab.kernel.services import AGENT_SETTINGS

IMAGE, IMAGE_BYTES = "boot", 256 * MIB
VMS = 10
BAR = 1.05
CACHES, MODES, REQUESTS = ("bcache", "dmcache"), ("direct", "buffered"), (4, 64, 1024)
LIMIT = 1800.0
"""Seconds for ten VMs to read by 4 KiB under emulation."""


def told(machine: Machine, name: str, *words: str) -> Any:
    """What a program of ``benchmarks.inside`` says in a guest. Raises CommandFailed."""
    return json.loads(machine.run(program(name, *words), timeout=LIMIT))


def use_cache(lab: KernelLab, host: Machine, cache: str) -> None:
    """Have a host without any image use another cache driver. Raises CommandFailed."""
    host.run(["systemctl", "stop", "virtman-agent.service"])
    host.run(["sed", "--in-place", "/^VIRTMAN_CACHE=/d", AGENT_SETTINGS])
    host.run(["tee", "--append", AGENT_SETTINGS], stdin=f"VIRTMAN_CACHE={cache}\n")
    lab.services.start_agent(host)


def case(lab: KernelLab, how: str, vms: int, request: int, mode: str) -> dict[str, Any]:
    """Let ``vms`` VMs read the boot set, and count."""
    [host] = lab.hosts
    origin, names = lab.machines["origin"], [f"vm-{number}" for number in range(vms)]
    sent = told(origin, "counts", "export", IMAGE)
    disks = told(host, "vms", "create", IMAGE, *names)
    read = told(host, "bootset", how, str(IMAGE_BYTES), str(request << 10), mode, *disks)
    fetched = told(host, "counts", "parents")
    sent = told(origin, "counts", "export", IMAGE) - sent
    told(host, "vms", "forget", *names)
    asked = read["asked"][0]
    return {
        "request_kib": request,
        "mode": mode,
        "asked_bytes": asked,
        "fetched_bytes": fetched,
        "sent_bytes": sent,
        "ratio": fetched / asked,
        "sent_ratio": sent / asked,
        "all_vms_ratio": fetched / sum(read["asked"]),
        "wrong": read["wrong"],
    }


def run(
    how: str, vms: int, caches: Sequence[str], cases: Sequence[tuple[int, str]], failures: list[str]
) -> dict[str, Any]:
    """All cases of each cache; one that fails is the last, and goes to ``failures``."""
    done: list[dict[str, Any]] = []
    with kernel_lab("kernel_fetch", 1, [], failures) as lab:
        lab.publish(IMAGE, IMAGE_BYTES)
        try:
            for cache in caches:
                use_cache(lab, lab.hosts[0], cache)
                for request, mode in cases:
                    done.append({"cache": cache, **case(lab, how, vms, request, mode)})
                    say(case_text(done[-1]))
        except EXPECTED as error:
            failures.append(f"after {len(done)} cases: {error}")
    if not done:
        raise Failed("; ".join(failures))
    return {"how": how, "vms": vms, "boot_set_bytes": BOOT_SET, "cases": done}


def case_text(done: dict[str, Any]) -> str:
    """One case for people."""
    return (
        f"{done['cache']}, {done['mode']}, {done['request_kib']} KiB: asked for {done['asked_bytes'] / MIB:.1f} MiB,"
        f" fetched {done['fetched_bytes'] / MIB:.1f} MiB ({done['ratio']:.3f}), origin sent {done['sent_ratio']:.3f}"
    )


@click.command(context_settings=SETTINGS)
@click.option("--vms", type=click.IntRange(min=1), default=VMS, show_default=True, help="VMs that read.")
@click.option("--together", is_flag=True, help="All VMs read at the same time, not one after the other.")
@click.option("--cache", "caches", multiple=True, type=click.Choice(CACHES), help="Only this driver.  [default: all]")
@click.option("--mode", "modes", multiple=True, type=click.Choice(MODES), help="Only these reads.  [default: all]")
@click.option(
    "--request",
    "requests",
    multiple=True,
    type=click.IntRange(4, 1024),
    help="Only these, in KiB.  [default: 4, 64, 1024]",
)
def main(vms: int, together: bool, caches: tuple[str, ...], modes: tuple[str, ...], requests: tuple[int, ...]) -> None:
    """Count the bytes that a host of the kernel stack fetches for VMs that read the same boot set of 40 MiB.

    Writes build/kernel_fetch.json and prints a table. Ends with exit code 1 if a VM read a wrong byte.

    \b
    Examples:
      python -m benchmarks.kernel_fetch                            # about half an hour
      python -m benchmarks.kernel_fetch --cache bcache --request 64
    """
    with benchmark():
        failures: list[str] = []
        cases = list(itertools.product(requests or REQUESTS, modes or MODES))
        figures = run("together" if together else "turn", vms, caches or CACHES, cases, failures)
        print_table(
            f"Fetched for {vms} VMs, as a multiple of what one of them read; bar: {BAR}",
            ["cache, reads", "asked for, MiB", "fetched, MiB", "times", "origin sent, times"],
            [
                [
                    f"{each['cache']}, {each['request_kib']} KiB, {each['mode']}",
                    f"{each['asked_bytes'] / MIB:.1f}",
                    f"{each['fetched_bytes'] / MIB:.1f}",
                    f"{each['ratio']:.3f}",
                    f"{each['sent_ratio']:.3f}",
                ]
                for each in figures["cases"]
            ],
        )
        if any(each["wrong"] for each in figures["cases"]):
            failures.append("VMs read wrong bytes")
        finish("kernel_fetch", figures, failures)


if __name__ == "__main__":
    main()
