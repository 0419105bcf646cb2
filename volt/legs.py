"""Legs of a deployment: a host that sends, and the hosts of its site that receive, begin together.

An image crosses the links between sites by the tree: in a site without an origin one host, its *pool node*, gets all of
the image first, and then sends. A leg begins when its sender and all its receivers are ready, or when they have been
waited for long enough. Who comes later, and what does not arrive, takes the tree. So a leg is tried once.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Collection, Iterable
from statistics import median

from sqlalchemy import ColumnElement, and_, delete, func, or_, select, update
from sqlalchemy.orm import Session

from volt.deploymodels import (
    UNDER_WAY,
    DeploymentLeg,
    TransferReport,
    TransferState,
    TransferTerms,
)
from volt.models import HostState
from volt.planning import AUTO, LINK_PART, METHODS, MULTICAST, TRIES
from volt.spans import united
from volt.store import DeploymentRow, HostRow, LegRow, TransferRow, node_table

log = logging.getLogger(__name__)

SHORTEST_WAIT = 10.0
"""Seconds that receivers have to get ready since their sender has, at least."""

OFFERED_WITHIN = 60.0
"""Seconds in which a host that has all of the image gets ready to send, at least."""

LISTENS = 2.0
"""Seconds since the sender is ready, after which a receiver that no multicast has reached takes the tree, at least."""

SLOW = 0.5
"""A receiver whose link carries a smaller part than this of what others' do takes the tree: it would hold them up."""

BEATS_PER_SECOND = 50
"""Heartbeats of all hosts that are under way, at most."""

MOST_RECEIVERS = 1000
"""Of a leg: each host is told of all."""


def plan(session: Session, deployment: DeploymentRow, hosts: Iterable[HostRow]) -> int:
    """Give the hosts that have to receive a leg of their site. Returns how many legs there are."""
    sites: dict[str, list[HostRow]] = {}
    for host in hosts:
        if can(host, deployment.method):
            sites.setdefault(_site(host), []).append(host)
    holders = {_site(host): host.name for host in _holders(session, deployment)}
    legs = 0
    for site, able in sites.items():
        if site not in holders and deployment.method == AUTO:
            continue  # who would try is to have the image first
        source = holders.get(site, able[0].name)
        receivers = [host.name for host in able if host.name != source]
        if not receivers:
            continue
        leg = LegRow(deployment_id=deployment.id, source=source)
        session.add(leg)
        session.flush()
        here = (TransferRow.deployment_id == deployment.id, TransferRow.host.in_([*receivers, source]))
        session.execute(update(TransferRow).where(*here).values(leg_id=leg.id))
        legs += 1
    return legs


def can(host: HostRow, method: str) -> bool:
    """Whether a host has what a method needs."""
    return method in host.methods.split()


def _site(host: HostRow) -> str:
    return host.place.partition("/")[0]


def _holders(session: Session, deployment: DeploymentRow) -> list[HostRow]:
    """Live hosts that have all of the image and the method, origins last."""
    n = node_table.c
    query = select(HostRow).join(node_table, n.host == HostRow.name).order_by(n.slot.desc(), HostRow.name)
    query = query.where(n.image_id == deployment.image_id, or_(n.slot <= 0, n.whole), HostRow.state == HostState.ALIVE)
    return [host for host in session.scalars(query) if can(host, deployment.method)]


# What hosts say


def note_receiver(transfer: TransferRow, leg: LegRow, report: TransferReport) -> bool:
    """A host of a leg says how ready it is. Returns whether that is news."""
    if leg.started is not None:
        if transfer.attempt == report.attempt:
            _note_findings(transfer, report)
            return False
        transfer.leg_id = None  # its agent started again: what it had agreed on is lost
        return True
    told = (report.attempt, report.contact, report.state, _hears(report.link))
    news = (transfer.attempt, transfer.contact, transfer.state, _hears(transfer.link)) != told
    _note_findings(transfer, report)
    transfer.attempt, transfer.contact, transfer.lacks = report.attempt, report.contact, json.dumps(report.lacks)
    return news


def _hears(link: float | None) -> bool | None:
    """Whether multicast reaches a host, if that is known."""
    return None if link is None else link > 0


def _note_findings(transfer: TransferRow, report: TransferReport) -> None:
    transfer.rate, transfer.delay = report.rate, report.delay
    transfer.link, transfer.loss = report.link, report.loss


def note_sender(session: Session, leg: LegRow, report: TransferReport, now: float) -> bool:
    """The sender of a leg says how far it is. Returns whether that is news."""
    leg.sent = report.sent
    if report.state is TransferState.WHOLE:
        leg.ended = now  # what is on its way still arrives
    elif report.state in (TransferState.FAILED, TransferState.CANCELLED):
        _give_up(session, leg, now, f"the sender {leg.source} fails: {report.error}")
    elif leg.started is not None and leg.attempt != report.attempt:
        _give_up(session, leg, now, f"the agent of the sender {leg.source} started again")
    elif report.contact and leg.attempt != report.attempt:
        leg.attempt, leg.contact, leg.offered = report.attempt, report.contact, now
    else:
        return False
    return True


def _give_up(session: Session, leg: LegRow, now: float, why: str) -> None:
    """Have the receivers of a leg take the tree."""
    log.warning("leg %d of deployment %d ends: %s", leg.id, leg.deployment_id, why)
    leg.ended = now
    session.execute(update(TransferRow).where(TransferRow.leg_id == leg.id).values(leg_id=None))


def is_late(leg: LegRow, deployment: DeploymentRow, now: float) -> bool:
    """Whether a leg may have waited long enough, or tried, so that ``advance`` or ``waits`` should look."""
    if leg.started is not None:
        return deployment.method == AUTO and now - leg.started >= TRIES
    if leg.offered is None:
        return now - _since(deployment) >= OFFERED_WITHIN
    return now - leg.offered >= (LISTENS if deployment.method in MULTICAST else SHORTEST_WAIT)


def goes_on(leg: LegRow, deployment: DeploymentRow) -> bool:
    """Whether a receiver that has all of the image goes on to send it in a leg, besides the leg's sender."""
    return METHODS[deployment.method].seeds and leg.ended is None


def of_receiver(session: Session, transfer: TransferRow) -> LegRow | None:
    """The leg in which a host receives: not one in which it is to send, for that it has the image by the tree."""
    leg = None if transfer.leg_id is None else session.get(LegRow, transfer.leg_id)
    return None if leg is None or leg.source == transfer.host else leg


def of_sender(session: Session, host: str) -> list[LegRow]:
    """The legs in which a host is to send now: it has all of the image."""
    own = select(TransferRow.deployment_id).where(TransferRow.host == host, TransferRow.state.in_(UNDER_WAY))
    query = select(LegRow).where(LegRow.source == host, LegRow.ended.is_(None), LegRow.deployment_id.not_in(own))
    return list(session.scalars(query.order_by(LegRow.id).with_for_update()))


def sent_by(session: Session, hosts: Collection[str]) -> list[int]:
    """The deployments in which these hosts are to send."""
    query = select(LegRow.deployment_id).where(LegRow.source.in_(hosts), LegRow.ended.is_(None))
    return list(session.scalars(query.distinct()))


# What becomes of it


def advance(session: Session, deployment: DeploymentRow, now: float, patience: float) -> None:
    """Begin the legs of a deployment that can begin, and end those that are over. ``patience``: see ``SHORTEST_WAIT``.

    The caller has locked the deployment.
    """
    query = select(LegRow).where(LegRow.deployment_id == deployment.id, LegRow.ended.is_(None))
    for leg in session.scalars(query.order_by(LegRow.id).with_for_update()).all():
        states = set(session.scalars(select(TransferRow.state).where(*_receives(leg)).distinct()))
        if not states:
            leg.ended = now
        elif not _is_alive(session, leg.source):
            _replace(session, leg, now)
        elif leg.offered is None:
            if now - _may_offer_since(session, deployment, leg) >= max(OFFERED_WITHIN, patience):
                _give_up(session, leg, now, f"the sender {leg.source} does not get ready")
        elif leg.started is None and now - leg.offered >= _waits_for(session, deployment, leg, states, patience):
            _begin(session, deployment, leg, now)
    session.flush()


def _waits_for(
    session: Session, deployment: DeploymentRow, leg: LegRow, states: Collection[TransferState], patience: float
) -> float:
    """Seconds since the sender is ready, after which its leg begins."""
    if TransferState.WAITING in states:
        return max(SHORTEST_WAIT, patience)
    if deployment.method not in MULTICAST:
        return 0.0
    query = select(func.count(), func.count(TransferRow.link), func.count().filter(TransferRow.link == 0))
    hosts, know, deaf = session.execute(query.where(*_receives(leg), TransferRow.contact != "")).one()
    if know < hosts:
        return max(SHORTEST_WAIT, patience)
    return max(LISTENS, 2 * hosts / BEATS_PER_SECOND) if deaf else 0.0  # each has told twice what it hears


def waits(session: Session, deployment: DeploymentRow, now: float, patience: float) -> bool:
    """Whether no leg of a deployment has tried the network for long enough, and one may."""
    begun = began(session, deployment)
    if begun is None:
        open_ = select(LegRow.id).where(LegRow.deployment_id == deployment.id, LegRow.ended.is_(None))
        return session.scalar(open_.limit(1)) is not None
    silent = (
        select(TransferRow.host)
        .join(LegRow, LegRow.id == TransferRow.leg_id)
        .where(
            LegRow.deployment_id == deployment.id, LegRow.started.is_not(None), TransferRow.state == TransferState.READY
        )
    )
    all_tell = session.scalar(silent.limit(1)) is None
    return now - begun < (TRIES if all_tell else max(SHORTEST_WAIT, patience))


def began(session: Session, deployment: DeploymentRow) -> float | None:
    """When the first leg of a deployment has begun."""
    query = select(func.min(LegRow.started)).where(LegRow.deployment_id == deployment.id)
    return session.scalar(query)


def forget(session: Session, deployment: DeploymentRow) -> None:
    """Delete the legs of a deployment, and what its hosts have said of them."""
    here = TransferRow.deployment_id == deployment.id
    session.execute(update(TransferRow).where(here).values(leg_id=None, attempt="", contact=""))
    under_way = TransferRow.state.in_(UNDER_WAY)
    session.execute(update(TransferRow).where(here, under_way).values(state=TransferState.WAITING))
    session.execute(delete(LegRow).where(LegRow.deployment_id == deployment.id))


def end(session: Session, deployment: DeploymentRow, now: float) -> None:
    """End the legs of a deployment."""
    here = (LegRow.deployment_id == deployment.id, LegRow.ended.is_(None))
    session.execute(update(LegRow).where(*here).values(ended=now))


def _receives(leg: LegRow) -> tuple[ColumnElement[bool], ...]:
    """Which rows are of hosts that receive in a leg."""
    return (TransferRow.leg_id == leg.id, TransferRow.host != leg.source, TransferRow.state.in_(UNDER_WAY))


def _receivers(session: Session, leg: LegRow) -> list[TransferRow]:
    query = select(TransferRow).where(*_receives(leg))
    return list(session.scalars(query.order_by(TransferRow.number).with_for_update()))


def _is_alive(session: Session, host: str) -> bool:
    state = session.scalar(select(HostRow.state).where(HostRow.name == host))
    return state is HostState.ALIVE


def _may_offer_since(session: Session, deployment: DeploymentRow, leg: LegRow) -> float:
    """Since when the sender has been told so: when it has all of the image. In the future while it gets that."""
    own = session.get(TransferRow, (deployment.id, leg.source))
    if own is None or own.state is TransferState.WAITING:
        return _since(deployment)
    return math.inf if own.ended is None else max(own.ended, _since(deployment))


def _since(deployment: DeploymentRow) -> float:
    """Since when it goes by its method."""
    return deployment.begun or deployment.created


def _replace(session: Session, leg: LegRow, now: float) -> None:
    """The sender is lost. Another host sends, unless the leg has begun or no two hosts are left."""
    receivers = _receivers(session, leg)
    if leg.started is not None or len(receivers) < 2:
        _give_up(session, leg, now, f"the sender {leg.source} is lost")
    else:
        leg.source, leg.attempt, leg.contact, leg.offered = receivers[0].host, "", "", None


def _begin(session: Session, deployment: DeploymentRow, leg: LegRow, now: float) -> None:
    """Those that are ready receive together; the others take the tree, and so does who would hold a multicast up."""
    receivers = _receivers(session, leg)
    ready = [each for each in receivers if each.contact]
    if deployment.method in MULTICAST:
        links = {each.host: each.link for each in ready if each.link}
        usual = median(links.values()) if links else 0.0
        leg.pace = int(LINK_PART * usual) or None
        least = SLOW * min(usual, deployment.bytes_limit or usual)
        ready = [each for each in ready if links.get(each.host, -1.0) >= least]
    ready = ready[:MOST_RECEIVERS]
    begin = {each.host for each in ready}
    for each in receivers:
        if each.host not in begin:
            each.leg_id = None
    if others := len(receivers) - len(ready):
        why = "they are not ready, or multicast does not reach them, or their links are slow"
        log.warning("leg %d of deployment %d: %d hosts take the tree: %s", leg.id, deployment.id, others, why)
    if not ready:
        leg.ended = now
        return
    leg.started, leg.ranges = now, json.dumps(united(json.loads(each.lacks) for each in ready))
    log.info("leg %d of deployment %d begins: %s to %d hosts", leg.id, leg.deployment_id, leg.source, len(ready))


# What hosts are told


def limit(leg: LegRow | None, deployment: DeploymentRow) -> int | None:
    """Bytes a second that each host receives at most: what was asked for, and what links carry."""
    known = [each for each in (deployment.bytes_limit, leg.pace if leg is not None else None) if each is not None]
    return min(known, default=None)


def terms(session: Session, leg: LegRow, attempt: str) -> TransferTerms:
    """What a host of a leg that has begun has to know."""
    query = select(TransferRow.contact).join(HostRow, HostRow.name == TransferRow.host, isouter=True)
    query = query.where(TransferRow.leg_id == leg.id, TransferRow.host != leg.source, TransferRow.contact != "")
    contacts = session.scalars(query.order_by(HostRow.place, TransferRow.number))
    return TransferTerms(
        number=leg.id, ranges=json.loads(leg.ranges), sender=leg.contact, receivers=list(contacts), attempt=attempt
    )


def described(session: Session, deployment: DeploymentRow) -> list[DeploymentLeg]:
    """The legs of a deployment as users see them."""
    receives = and_(TransferRow.leg_id == LegRow.id, TransferRow.host != LegRow.source)
    query = select(LegRow, func.count(TransferRow.host)).join(TransferRow, receives, isouter=True).group_by(LegRow.id)
    rows = session.execute(query.where(LegRow.deployment_id == deployment.id).order_by(LegRow.id))
    return [
        DeploymentLeg(
            source=leg.source, sent=leg.sent, receivers=receivers, ended=leg.ended is not None,
            begun=None if leg.started is None else leg.started - deployment.created,
        )
        for leg, receivers in rows
    ]  # fmt: skip
