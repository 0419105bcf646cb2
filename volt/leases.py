"""Leases: how often hosts have to be heard of, and what becomes of silent ones.

A host has the lease that it was told last, however many hosts there are now: the host chose its next heartbeat by that.
While Volt or its database is away, nobody can renew a lease. So all leases begin anew when they are back.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from sqlalchemy import ColumnElement, and_, func, select, update
from sqlalchemy.orm import Session

from volt.deployments import Deployments
from volt.errors import HostTaken, OriginNeeded
from volt.metrics import Metrics
from volt.models import HostState
from volt.queries import images_of
from volt.store import HostRow, ImageRow, Store, changing_tree, edge_key_table
from volt.tree import Tree

log = logging.getLogger(__name__)

HEARTBEATS_PER_SECOND = 25
"""With many hosts the interval grows, so that Volt gets no more than this."""
LEASE_INTERVALS = 5
"""A lease has at least this many intervals, since some heartbeats may get lost."""
CHECKS_PER_LEASE = 10
"""How often Volt looks for silent hosts in the time of the shortest lease."""
EVICTED_AT_ONCE = 50
"""Hosts evicted in one transaction. It loads each of their trees once, but other calls wait for it."""


def steady_clock(
    time_of_day: Callable[[], float] = time.time, steady: Callable[[], float] = time.monotonic
) -> Callable[[], float]:
    """Seconds since the epoch as of now, then by a clock that nobody sets: a jump of the time evicts no host."""
    offset = time_of_day() - steady()
    return lambda: offset + steady()


@dataclass(frozen=True)
class Policy:
    """``heartbeat_s``: the interval while there are few hosts. ``lease_s``: the shortest lease. Both in seconds."""

    fanout: int = 2
    heartbeat_s: float = 2.0
    lease_s: float = 10.0


class Leases:
    """Hosts' leases. ``now``: seconds since the epoch, by a clock that is never set back."""

    def __init__(
        self, store: Store, policy: Policy, now: Callable[[], float], metrics: Metrics, deployments: Deployments
    ) -> None:
        """All leases begin now at the earliest."""
        self._store, self._policy, self._now, self._metrics = store, policy, now, metrics
        self._deployments = deployments
        self.check_s = policy.lease_s / CHECKS_PER_LEASE
        """Seconds between two calls of ``expire``."""
        self._since = self._answered = now()

    def terms(self, session: Session) -> tuple[float, float]:
        """The interval and the lease that hosts are told now, in seconds."""
        alive = session.scalar(select(func.count()).where(HostRow.state == HostState.ALIVE)) or 0
        interval = max(self._policy.heartbeat_s, alive / HEARTBEATS_PER_SECOND)
        return interval, max(self._policy.lease_s, LEASE_INTERVALS * interval)

    def renew(self, row: HostRow, agent: str) -> None:
        """Note that this agent called in the host's name.

        Raises HostTaken: the name belongs to another agent, and that agent's lease has not run out.
        """
        if row.state is HostState.ALIVE and row.agent not in ("", agent):
            raise HostTaken(
                f"another agent runs under the host name {row.name}, at {row.address}: give one of the two agents"
                " another --name; or stop the other one for good, and the name is free when its lease has run out, or"
                f" after: volt hosts remove {row.name}"
            )
        if row.state is HostState.LOST:
            log.info("host %s is back", row.name)
        row.state, row.last_seen, row.agent = HostState.ALIVE, self._now(), agent

    def expire(self) -> None:
        """Evict the hosts whose lease ran out. Call this every ``check_s`` seconds.

        A call that fails, or comes late, shows that the database or Volt was away.
        """
        try:
            with self._store.write(durable=False) as session:  # like a heartbeat
                # A full disk can be read, but takes no heartbeat: so this write has to succeed first.
                session.execute(update(edge_key_table).values(id=1))
                lease = self.terms(session)[1]
                silent = session.scalars(
                    select(HostRow.name).where(self._is_silent(lease)).order_by(HostRow.name)
                ).all()
            if self._was_away():
                return
            for first in range(0, len(silent), EVICTED_AT_ONCE):
                self._evict(silent[first : first + EVICTED_AT_ONCE], lease)
            self._deployments.settle(self._deployments.unsettled())
        except Exception:
            self._answered = -math.inf
            raise

    def _is_silent(self, lease: float) -> ColumnElement[bool]:
        """``lease``: of hosts that have not been told one."""
        told, now = func.coalesce(HostRow.lease_s, lease), self._now()
        return and_(HostRow.state == HostState.ALIVE, HostRow.last_seen + told < now, self._since + told < now)

    def _was_away(self) -> bool:
        """The database answered now. If it did not do so for long, all leases begin anew."""
        now = self._now()
        away = now - self._answered > self._policy.lease_s / 2
        if away:
            log.warning("the database, or Volt, was away: all leases begin anew")
            self._since = now
        self._answered = now
        return away

    def _evict(self, names: Collection[str], lease: float) -> None:
        """Evict those of these hosts that are still silent."""
        with self._store.write() as session:
            silent = select(HostRow).where(HostRow.name.in_(names), self._is_silent(lease)).order_by(HostRow.name)
            rows = session.scalars(silent.with_for_update(key_share=True)).all()
            if self._was_away():  # this transaction waited for long
                return
            for row in rows:
                row.state = HostState.LOST
                log.warning("the lease of host %s ran out", row.name)
            for image in images_of(session, *(row.name for row in rows)):
                with changing_tree(session, image, self._now()) as tree:
                    for row in rows:
                        self._lose(tree, image, row.name)
            ended = self._deployments.lose(session, [row.name for row in rows])
        self._deployments.settle(ended)

    def _lose(self, tree: Tree, image: ImageRow, host: str) -> None:
        if host not in tree.hosts:
            return  # it has no place in this tree, or left while this transaction waited for the image's lock
        if tree.hosts[host].slot > 0:
            leave_tree(tree, image, host, self._metrics)
            tree.departures[host].awaited = True
        else:
            tree.lose(host)


def leave_tree(tree: Tree, image: ImageRow, host: str, metrics: Metrics, dropped: int = -1) -> None:
    """Take a host out of a tree. ``dropped``: as for Tree.leave. Raises OriginNeeded."""
    if [origin.host for origin in tree.origins] == [host]:
        raise OriginNeeded(f"host {host} is the last origin of image {image.name}: remove the image instead")
    if tree.leave(host, dropped):
        metrics.moves.inc()
    log.info("host %s left the tree of image %s", host, image.name)
