"""Deployments: whole images on their way to many hosts, planned once.

A row for each deployment and each of its hosts says what is wanted and how far that is. Each answer to a heartbeat
repeats what the host has to do, until the host has said that it is done: so no host remembers it, and no lost or late
answer does harm. What a host is told is no more than to keep all of the image, and when to begin.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from statistics import median

from sqlalchemy import and_, exists, func, or_, select, update
from sqlalchemy.orm import Session

from volt import legs, queries
from volt.deploymodels import (
    UNDER_WAY,
    Deployment,
    DeploymentHost,
    DeploymentRequest,
    TransferReport,
    TransferState,
    TransferTask,
)
from volt.errors import BadRequest, DeploymentUnknown, HostUnknown, ImageWithdrawn
from volt.models import HostState
from volt.planning import (
    AUTO,
    BY_TREE,
    HOP,
    METHODS,
    OLDEST,
    RATE,
    SLOWEST,
    Facts,
    Method,
    chain_is_faster,
    corrected,
    predict,
)
from volt.spans import united
from volt.store import DeploymentRow, HostRow, ImageRow, LegRow, Store, TransferRow, changing_tree
from volt.tree import depth

log = logging.getLogger(__name__)

SHORTEST_INTERVAL = 0.5
"""Seconds between the heartbeats of hosts that are under way, at least, while some wait for others to be ready."""
PROGRESS_INTERVAL = 1.0
"""The same while all move bytes."""
MOST_LISTED = 1000
TOO_OLD = "its agent is of an earlier release, which knows no deployments"
PROVEN = "blake3-"
"""How the digests begin that prove each part of an image."""


class Deployments:
    """The deployments in a store. ``now``: seconds since the epoch, by a clock that is never set back."""

    def __init__(self, store: Store, now: Callable[[], float]) -> None:
        self._store, self._now = store, now

    def create(self, wanted: DeploymentRequest) -> Deployment:
        """Plan a deployment, and have its hosts begin. One that is under way to the same hosts goes on instead.

        Raises ImageUnknown, ImageWithdrawn, HostUnknown, BadRequest.
        """
        method = _method(wanted)
        with self._store.write() as session:
            hosts = _hosts(session, wanted)
            image = queries.published(session, wanted.image, lock=True)
            if image.withdrawn:
                raise ImageWithdrawn(f"image {image.name} is withdrawn: no further host gets it")
            _check_method(method, image, hosts)
            if (same := _under_way(session, wanted, image, hosts)) is not None:
                return self._described(session, same, image)
            row = DeploymentRow(
                image_id=image.id, size=image.size, digest=image.digest, asked=wanted.method,
                method=method.name, encrypt=wanted.encrypt, bytes_limit=wanted.limit, keep_s=wanted.keep_s,
                parallel=wanted.parallel, created=self._now(),
            )  # fmt: skip
            origins = queries.origins_of(session, image)
            if row.method == "unicast":
                row.source = next(iter(queries.alive_hosts(session, origins)), origins[0])
            session.add(row)
            session.flush()
            for number, host in enumerate(hosts):
                state = _first_state(host, origins)
                ended = None if state is TransferState.WAITING else row.created
                session.add(TransferRow(deployment_id=row.id, host=host.name, number=number, state=state, ended=ended))
            session.flush()
            waiting = [host for host in hosts if _first_state(host, origins) is TransferState.WAITING]
            if method.together and legs.plan(session, row, waiting) == 0 and method.name == AUTO:
                row.method, row.why = "tree", "no two hosts could try the network"
            if row.method not in (AUTO, *BY_TREE):
                row.begun = row.created
            log.info("deployment %d: image %s to %d hosts by %s", row.id, image.name, len(hosts), row.method)
            self._settle(session, image, row)
            self._reshape(session, image)
            return self._described(session, row, image)

    def all(self) -> list[Deployment]:
        with self._store.read() as session:
            rows = session.execute(
                select(DeploymentRow, ImageRow)
                .join(ImageRow, ImageRow.id == DeploymentRow.image_id)
                .order_by(DeploymentRow.id.desc())
                .limit(MOST_LISTED)
            )
            return [self._described(session, row, image, hosts=False) for row, image in rows]

    def one(self, number: int) -> Deployment:
        """Raises DeploymentUnknown."""
        with self._store.read() as session:
            row = session.get(DeploymentRow, number)
            if row is None:
                raise DeploymentUnknown(f"there is no deployment {number}")
            return self._described(session, row, session.get_one(ImageRow, row.image_id))

    def cancel(self, number: int) -> None:
        """End a deployment: hosts that have all of the image keep it. Raises DeploymentUnknown."""
        with self._store.write() as session:
            row, image = self._locked(session, number)
            if row.ended is not None:
                return
            log.info("deployment %d is cancelled", number)
            row.ended, row.cancelled = self._now(), True
            legs.end(session, row, row.ended)
            here = (TransferRow.deployment_id == number, TransferRow.state.in_(UNDER_WAY))
            session.execute(update(TransferRow).where(*here).values(state=TransferState.CANCELLED))
            self._reshape(session, image)

    def hear(
        self, session: Session, host: str, reports: Sequence[TransferReport] | None
    ) -> tuple[list[TransferTask], list[int]]:
        """Note how far a host is. Returns what it has to do, and the deployments that need a ``settle``.

        ``reports``: none of an agent that knows nothing of deployments.
        """
        if reports is None:
            return [], self._end(session, [host], TransferState.FAILED, TOO_OLD)
        received = {report.deployment: report for report in reports if not report.sends}
        sent = {report.deployment: report for report in reports if report.sends}
        touched: list[int] = []
        tasks: list[TransferTask] = []
        sending = legs.of_sender(session, host)  # locked before the transfers, as in legs.advance
        for transfer, row, image in _transfers_of(session, host):
            leg = legs.of_receiver(session, transfer)
            if (report := received.get(row.id)) is not None and self._note(transfer, leg, row, report):
                touched.append(row.id)
            leg = leg if transfer.leg_id is not None else None
            if transfer.ended is None or (leg is not None and legs.goes_on(leg, row)):
                tasks.append(_task(session, transfer, leg, row, image))
        for leg in sending:
            row = session.get_one(DeploymentRow, leg.deployment_id)
            report = sent.get(row.id)
            if report and report.method == row.method and legs.note_sender(session, leg, report, self._now()):
                touched.append(row.id)
            if leg.ended is None:
                tasks.append(_sender_task(session, leg, row))
        return tasks, touched

    def _note(self, transfer: TransferRow, leg: LegRow | None, row: DeploymentRow, report: TransferReport) -> bool:
        """Whether the deployment needs a ``settle``."""
        transfer.sent = report.sent
        if transfer.ended is not None:
            return False
        final = report.state not in (*UNDER_WAY, TransferState.UNKNOWN)
        if transfer.state is TransferState.CANCELLED and not final:
            return False  # the host has not heard of that yet
        if leg is not None and report.method != row.method and not final:
            return False  # nor of this method
        news = leg is not None and legs.note_receiver(transfer, leg, report)
        transfer.state = report.state if report.state is not TransferState.UNKNOWN else TransferState.FILLING
        transfer.done, transfer.total, transfer.error = report.done, report.total, report.error
        transfer.ended = self._now() if final else None
        if leg is not None:
            return final or news or legs.is_late(leg, row, self._now())
        return final or row.begun is None

    def interval(self, session: Session) -> float:
        """Seconds between the heartbeats of hosts that are under way."""
        states = (
            select(TransferRow.state, func.count().label("hosts"))
            .where(TransferRow.ended.is_(None))
            .group_by(TransferRow.state)
        )
        hosts: dict[str, int] = {row.state: row.hosts for row in session.execute(states)}
        moving = hosts.keys() <= {TransferState.FILLING}
        return max(PROGRESS_INTERVAL if moving else SHORTEST_INTERVAL, sum(hosts.values()) / legs.BEATS_PER_SECOND)

    def lose(self, session: Session, hosts: Collection[str]) -> list[int]:
        """The leases of hosts ran out. Returns the deployments that may have ended (``settle``)."""
        return self._end(session, hosts, TransferState.LOST)

    def _end(self, session: Session, hosts: Collection[str], state: TransferState, error: str = "") -> list[int]:
        """End all that hosts do in deployments. Returns the deployments."""
        here = (TransferRow.host.in_(hosts), TransferRow.ended.is_(None))
        touched = session.scalars(select(TransferRow.deployment_id).where(*here).distinct()).all()
        if touched:
            values = {"state": state, "error": error, "ended": self._now()}
            session.execute(update(TransferRow).where(*here).values(values))
        return [*touched, *legs.sent_by(session, hosts)]

    def unsettled(self) -> list[int]:
        """Deployments in which no host is under way, but which have not ended: Volt was killed before that."""
        under_way = (TransferRow.deployment_id == DeploymentRow.id, TransferRow.state.in_(UNDER_WAY))
        with self._store.read() as session:
            query = select(DeploymentRow.id).where(DeploymentRow.ended.is_(None), ~exists().where(*under_way))
            return list(session.scalars(query))

    def note_join(self, session: Session, image: ImageRow, host: str) -> None:
        """A host is about to join an image's tree: it is to be behind no long chain."""
        if image.shape is not None:
            self._reshape(session, image, host)

    def settle(self, numbers: Collection[int], patience: float = 0.0) -> None:
        """Have those legs of deployments begin that can, and end what no host is under way with any more.

        ``patience``: seconds in which each host has told Volt how it is.
        """
        for number in sorted(set(numbers)):
            with self._store.write() as session:
                row, image = self._locked(session, number)
                before = (row.method, row.ended)
                legs.advance(session, row, self._now(), patience)
                if row.method == AUTO:
                    self._choose(session, image, row, patience)
                elif row.begun is None:
                    self._begin(session, image, row, patience)
                self._settle(session, image, row)
                if before != (row.method, row.ended):
                    self._reshape(session, image)

    def _begin(self, session: Session, image: ImageRow, row: DeploymentRow, patience: float) -> None:
        """Have the hosts of a tree read when all are in their places: who reads before that reads from others."""
        waiting = (TransferRow.deployment_id == row.id, TransferRow.state == TransferState.WAITING)
        settled = session.scalar(select(func.count()).where(*waiting)) == 0 and queries.is_settled(session, image)
        if settled or self._now() - row.created >= max(legs.SHORTEST_WAIT, patience):
            row.begun = self._now()

    def _choose(self, session: Session, image: ImageRow, row: DeploymentRow, patience: float) -> None:
        """Choose the method of a deployment whose hosts have tried the network in a leg."""
        here = (TransferRow.deployment_id == row.id, TransferRow.state.in_(UNDER_WAY))
        tried = session.scalars(select(TransferRow).where(*here).order_by(TransferRow.number)).all()
        if not tried:
            row.method, row.why = "tree", "no host waited for anything any more before the try had ended"
        if row.method != AUTO or legs.waits(session, row, self._now(), patience):
            return
        hosts = session.scalars(select(HostRow).where(HostRow.name.in_([each.host for each in tried]))).all()
        facts = _facts(session, row, image, tried, hosts, self._now())
        modelled = predict(facts)
        predicted = corrected(modelled, _history(session))
        row.method, row.begun = min(predicted, key=predicted.__getitem__), self._now()
        row.predicted, row.modelled = json.dumps(predicted), modelled[row.method]
        row.why = str(facts)
        log.info("deployment %d goes by %s: %s", row.id, row.method, row.why)
        legs.forget(session, row)
        if METHODS[row.method].together:
            legs.plan(session, row, hosts)

    def _settle(self, session: Session, image: ImageRow, row: DeploymentRow) -> None:
        here = (TransferRow.deployment_id == row.id, TransferRow.state.in_(UNDER_WAY))
        if row.ended is None and session.scalar(select(func.count()).where(*here)) == 0:
            row.ended = self._now()
            legs.end(session, row, row.ended)
            log.info("deployment %d of image %s has ended after %.0f s", row.id, image.name, row.ended - row.created)

    def _reshape(self, session: Session, image: ImageRow, joins: str | None = None) -> None:
        """A chain while trees deploy the image, if nobody else would be behind a long one; else the usual heap."""
        session.flush()
        hosts = select(TransferRow.host).join(DeploymentRow, DeploymentRow.id == TransferRow.deployment_id)
        by_tree = DeploymentRow.method.in_(("tree", AUTO))
        here = (DeploymentRow.image_id == image.id, DeploymentRow.ended.is_(None), by_tree)
        receivers = set(session.scalars(hosts.where(*here)))
        if not receivers and image.shape is None:
            return
        with changing_tree(session, image, self._now()) as tree:
            others = {node.host for node in tree.members if not node.whole} - receivers
            if joins is not None:
                others |= {joins} - receivers
            chain = bool(receivers) and not others and chain_is_faster(image.size, len(receivers), image.fanout)
            image.shape = 1 if chain else None
            tree.reshape(image.shape or image.fanout)

    def _locked(self, session: Session, number: int) -> tuple[DeploymentRow, ImageRow]:
        """A deployment and its image, both locked: the image first, as everywhere. Raises DeploymentUnknown."""
        row = session.get(DeploymentRow, number)
        if row is None:
            raise DeploymentUnknown(f"there is no deployment {number}")
        image = session.scalars(select(ImageRow).where(ImageRow.id == row.image_id).with_for_update()).one()
        session.refresh(row, with_for_update=True)
        return row, image

    def _described(self, session: Session, row: DeploymentRow, image: ImageRow, *, hosts: bool = True) -> Deployment:
        places = dict(session.execute(select(HostRow.name, HostRow.place)).all()) if hosts else {}
        sent = queries.sent_bytes(session, image) if hosts else {}
        query = select(TransferRow).where(TransferRow.deployment_id == row.id).order_by(TransferRow.number)
        return Deployment(
            id=row.id, image=image.name, size=row.size, digest=row.digest, asked=row.asked, method=row.method,
            encrypt=row.encrypt, limit=row.bytes_limit, keep_s=row.keep_s, predicted=json.loads(row.predicted),
            why=row.why,
            created=datetime.fromtimestamp(row.created, UTC),
            seconds=(row.ended or self._now()) - row.created, ended=row.ended is not None, cancelled=row.cancelled,
            hosts=[
                DeploymentHost(
                    host=each.host, place=places.get(each.host, ""), state=each.state, done=each.done, total=each.total,
                    sent=each.sent + sent.get(each.host, 0), error=each.error,
                    seconds=None if each.ended is None else each.ended - row.created,
                )
                for each in (session.scalars(query) if hosts else ())
            ],
            legs=legs.described(session, row) if hosts else [],
        )  # fmt: skip


def _hosts(session: Session, wanted: DeploymentRequest) -> list[HostRow]:
    """The hosts that are meant, locked: none of them is evicted before it has a row. Raises BadRequest, HostUnknown."""
    if [wanted.hosts is not None, wanted.place is not None, wanted.everywhere].count(True) != 1:
        raise BadRequest("say either hosts, or a place, or everywhere")
    query = select(HostRow).order_by(HostRow.name).with_for_update(key_share=True)
    if wanted.hosts is not None:
        found = {host.name: host for host in session.scalars(query.where(HostRow.name.in_(wanted.hosts)))}
        if unknown := [name for name in wanted.hosts if name not in found]:
            raise HostUnknown(f"no host is registered as {', '.join(unknown)}", tuple(unknown))
        return list(found.values())
    if wanted.place is not None:
        below = HostRow.place.startswith(wanted.place + "/", autoescape=True)
        query = query.where(or_(HostRow.place == wanted.place, below))
    hosts = list(session.scalars(query.where(HostRow.state == HostState.ALIVE)))
    if not hosts:
        raise BadRequest(f"no host is alive{f' in {wanted.place}' if wanted.place else ''}")
    return hosts


def _under_way(
    session: Session, wanted: DeploymentRequest, image: ImageRow, hosts: Sequence[HostRow]
) -> DeploymentRow | None:
    """The deployment that does the same already, for as long at least."""
    here = (DeploymentRow.image_id == image.id, DeploymentRow.ended.is_(None), DeploymentRow.keep_s >= wanted.keep_s)
    query = select(DeploymentRow).where(*here)
    asked = (wanted.method, wanted.encrypt, wanted.limit, wanted.parallel)
    for row in session.scalars(query.order_by(DeploymentRow.id)):
        there = set(session.scalars(select(TransferRow.host).where(TransferRow.deployment_id == row.id)))
        if (row.asked, row.encrypt, row.bytes_limit, row.parallel) == asked and there == {host.name for host in hosts}:
            return row
    return None


def _first_state(host: HostRow, origins: Collection[str]) -> TransferState:
    if host.name in origins:
        return TransferState.WHOLE
    return TransferState.WAITING if host.state is HostState.ALIVE else TransferState.LOST


def _method(wanted: DeploymentRequest) -> Method:
    """The method that is asked for, or chosen. Raises BadRequest."""
    method = METHODS.get(wanted.method)
    if method is None:
        raise BadRequest(f"there is no method {wanted.method!r}: {', '.join(METHODS)} are allowed")
    if wanted.encrypt and not method.encrypts:
        able = [name for name, each in METHODS.items() if each.encrypts]
        raise BadRequest(f"the method {method.name} cannot encrypt; these can: {', '.join(able)}")
    return method


def _check_method(method: Method, image: ImageRow, hosts: Collection[HostRow]) -> None:
    """Raises BadRequest."""
    if not method.together or method.name == AUTO:
        return
    if not image.digest.startswith(PROVEN):
        raise BadRequest(
            f"nothing proves what image {image.name} holds, since nobody has read all of it: the method {method.name}"
            " needs that; publish the image with its digest, or use the method tree"
        )
    if not any(legs.can(host, method.name) for host in hosts):
        raise BadRequest(f"none of these hosts has what the method {method.name} needs; see there: virtman doctor")


def _facts(
    session: Session, row: DeploymentRow, image: ImageRow, tried: Sequence[TransferRow], hosts: Sequence[HostRow],
    now: float,
) -> Facts:  # fmt: skip
    rates, delays, links, losses = (
        [value for each in tried if (value := getattr(each, found)) is not None]
        for found in ("rate", "delay", "link", "loss")
    )
    missing = sum(end - begin for begin, end in united(json.loads(each.lacks) for each in tried if each.contact))
    rate = max(median(rates), SLOWEST) if rates else RATE
    began, shape = legs.began(session, row) or now, image.shape or image.fanout
    usable = [name for name in METHODS if 2 * sum(legs.can(host, name) for host in hosts) > len(hosts)]
    return Facts(
        size=missing or image.size, hosts=len(tried), fanout=image.fanout, shape=shape, rate=rate,
        hop=max(delays) / max(1, depth(len(delays), shape)) if delays else HOP,
        link=max(median(links), rate) if links else rate,
        loss=median(losses) if losses else 0.0, reached=len(losses) / len(tried), limit=row.bytes_limit,
        encrypt=_is_encrypted(row), able=frozenset(usable) if image.digest.startswith(PROVEN) else frozenset(),
        taken=now - row.created, tried=now - began,
    )  # fmt: skip


def _history(session: Session) -> list[tuple[str, float, float]]:
    """Of the last deployments of which all hosts have all: the method, the seconds of the model, and the real ones."""
    others = exists().where(TransferRow.deployment_id == DeploymentRow.id, TransferRow.state != TransferState.WHOLE)
    row = DeploymentRow
    query = select(row.method, row.modelled, row.ended - row.created)
    query = query.where(row.ended.is_not(None), row.modelled.is_not(None), ~others)
    found = session.execute(query.order_by(row.id.desc()).limit(OLDEST))
    return [(method, modelled or 0.0, real or 0.0) for method, modelled, real in found]


def _transfers_of(session: Session, host: str) -> Sequence[tuple[TransferRow, DeploymentRow, str]]:
    """What a host is to receive, or has received and may have to send on."""
    seeds = [name for name, method in METHODS.items() if method.seeds]
    is_seed = and_(
        DeploymentRow.ended.is_(None), DeploymentRow.method.in_(seeds), TransferRow.state == TransferState.WHOLE
    )
    found = session.execute(
        select(TransferRow, DeploymentRow, ImageRow.name)
        .join(DeploymentRow, DeploymentRow.id == TransferRow.deployment_id)
        .join(ImageRow, ImageRow.id == DeploymentRow.image_id)
        .where(TransferRow.host == host, or_(TransferRow.ended.is_(None), is_seed))
        .with_for_update(of=TransferRow)
    )
    return [(transfer, row, image) for transfer, row, image in found]


def _task(session: Session, transfer: TransferRow, leg: LegRow | None, row: DeploymentRow, image: str) -> TransferTask:
    method = METHODS[row.method]
    begun = leg is not None and leg.started is not None
    heard = transfer.state is TransferState.FILLING  # it names all receivers: not with each heartbeat
    return TransferTask(
        deployment=row.id,
        image=image,
        digest=row.digest,
        method=method.name if leg is not None or not method.together else "tree",
        keep_until=row.created + row.keep_s,
        go=begun if leg is not None else _may_read(session, transfer, row),
        source=row.source,
        terms=legs.terms(session, leg, transfer.attempt) if leg is not None and begun and not heard else None,
        encrypt=_is_encrypted(row),
        limit=legs.limit(leg, row),
        cancelled=transfer.state is TransferState.CANCELLED,
    )


def _sender_task(session: Session, leg: LegRow, row: DeploymentRow) -> TransferTask:
    return TransferTask(
        deployment=row.id,
        image=session.get_one(ImageRow, row.image_id).name,
        digest=row.digest,
        method=row.method,
        keep_until=row.created + row.keep_s,
        go=leg.started is not None,
        sends=True,
        terms=legs.terms(session, leg, leg.attempt) if leg.started is not None else None,
        encrypt=_is_encrypted(row),
        limit=legs.limit(leg, row),
    )


def _is_encrypted(row: DeploymentRow) -> bool:
    """Whether nobody else may read what travels: so it is where Volt chooses the method and nobody said anything."""
    return row.asked == AUTO if row.encrypt is None else row.encrypt


def _may_read(session: Session, transfer: TransferRow, row: DeploymentRow) -> bool:
    """Whether a host is to read from the tree now."""
    return _takes_turn(session, transfer, row) if row.method == "unicast" else row.begun is not None


def _takes_turn(session: Session, transfer: TransferRow, row: DeploymentRow) -> bool:
    """Whether a host is to read now: it does already, or it is ready, fewer do than may, and it takes a turn."""
    if transfer.state is TransferState.READY:
        here = (TransferRow.deployment_id == row.id, TransferRow.state == TransferState.FILLING)
        if (session.scalar(select(func.count()).where(*here)) or 0) < row.parallel:
            transfer.state = TransferState.FILLING
    return transfer.state is TransferState.FILLING
