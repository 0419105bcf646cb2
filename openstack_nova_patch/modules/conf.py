"""The options: a group of its own in nova.conf, on all nodes of Nova alike."""

from __future__ import annotations

from oslo_config import cfg

GROUP = cfg.OptGroup(
    "virtman",
    title="VirtMan",
    help="Disks of servers, and volumes, by VirtMan. Nothing changes while both are off.",
)

OPTIONS = [
    cfg.BoolOpt(
        "use_vmtsnapshot",
        default=False,
        help="""
A server that boots from a volume which is marked as a base does not get the volume, but a private snapshot of it, which
the VirtMan agent of its host makes. A volume is a base if its metadata have virtman_base=true. To be the same on hosts
of nova-api, nova-conductor and nova-compute.
""",
    ),
    cfg.BoolOpt(
        "use_cachegroup",
        default=False,
        help="""
Volumes that are block devices of the host are read through the cache group of its VirtMan agent, of the kernel stack.
Volumes that several servers may attach are not. To be set on hosts of nova-compute.
""",
    ),
    cfg.StrOpt(
        "socket",
        default="/run/virtman/agent.sock",
        help="""
The socket of the VirtMan agent of this host. {node} stands for the name of the compute node, where several run on one
machine.
""",
    ),
    cfg.IntOpt(
        "agent_timeout",
        default=600,
        min=1,
        help="Seconds that one call of the agent may take: a host that attaches may have to wait for a parent.",
    ),
    cfg.BoolOpt(
        "origin",
        default=False,
        help="""
This host attaches bases from Cinder itself, and is a further origin of them, where it can: Cinder lets several hosts
attach only volumes of a type with multiattach. Other hosts attach a base when no host has.
""",
    ),
    cfg.IntOpt(
        "base_timeout",
        default=300,
        min=1,
        help="Seconds to wait until another compute host, which attaches a base from Cinder, has made it known.",
    ),
]


def register_opts(conf: cfg.ConfigOpts) -> None:
    """Make the options known."""
    conf.register_group(GROUP)
    conf.register_opts(OPTIONS, group=GROUP)


def list_opts() -> dict[cfg.OptGroup, list[cfg.Opt]]:
    """All of them, for the sample configuration."""
    return {GROUP: OPTIONS}
