"""Volt's database: hosts, images, nodes, departures, boot sets, a key. It has no parents: the slots tell them.

Each use is one short transaction. Writers of one image exclude each other by a lock on the image's row, writers of one
host by a lock on the host's row, taken in the order hosts by name, then images by id.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from enum import StrEnum
from operator import attrgetter
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from volt.deploymodels import TransferState
from volt.errors import VoltError
from volt.models import HostState, NodeState
from volt.tree import Departure, Node, Tree

MIGRATIONS = Path(__file__).with_name("migrations")
NAME = sa.String(63)
PLACE = sa.String(127)


def _words(kind: type[StrEnum]) -> sa.Enum:
    return sa.Enum(
        kind, native_enum=False, create_constraint=False, length=16, values_callable=lambda e: [m.value for m in e]
    )


class Base(DeclarativeBase):
    """The tables."""


class HostRow(Base):
    """A registered host. ``last_seen``: seconds since the epoch. ``lease_s``: the lease it was told last, if any.

    ``agent``: the id of the agent that has the name, empty if that agent has told none. ``place``: its site and rack.
    ``methods``: the words of those by which it can send and receive whole images.
    """

    __tablename__ = "hosts"

    name: Mapped[str] = mapped_column(NAME, primary_key=True)
    address: Mapped[str] = mapped_column(sa.String(512))
    state: Mapped[HostState] = mapped_column(_words(HostState), index=True)
    last_seen: Mapped[float] = mapped_column(sa.Float(53))
    lease_s: Mapped[float | None] = mapped_column(sa.Float(53))
    agent: Mapped[str] = mapped_column(sa.String(32), default="")
    place: Mapped[str] = mapped_column(PLACE, default="")
    methods: Mapped[str] = mapped_column(sa.String(1100), default="")


class ImageRow(Base):
    """An image. The row outlives the image, so that revisions under one name never start again from the beginning.

    ``fanout`` is that of the time of publishing: another one would turn all parents of a living tree around at once.
    ``withdrawn``: it goes, or went, when no host needs it any more; hosts need not keep its content for later either.
    ``parent``: the name of the image that it was made of. No foreign key: the parent may go, or not be known.
    ``home``: the place of its first origin. ``shape``: the fanout that its tree has for a while instead of ``fanout``.
    """

    __tablename__ = "images"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(NAME, unique=True)
    published: Mapped[bool]
    size: Mapped[int] = mapped_column(sa.BigInteger)
    digest: Mapped[str] = mapped_column(sa.String(145), index=True)
    fanout: Mapped[int]
    revision: Mapped[int] = mapped_column(sa.BigInteger)
    begun: Mapped[int] = mapped_column(sa.BigInteger, default=0)
    withdrawn: Mapped[bool] = mapped_column(default=False)
    parent: Mapped[str | None] = mapped_column(NAME)
    home: Mapped[str] = mapped_column(PLACE, default="")
    shape: Mapped[int | None]


class BootSetRow(Base):
    """What VMs read first of the images with a digest. ``ranges``: JSON (volt/bootsets.py); ``boots`` made it."""

    __tablename__ = "boot_sets"

    digest: Mapped[str] = mapped_column(sa.String(145), primary_key=True)
    ranges: Mapped[str] = mapped_column(sa.Text)
    boots: Mapped[int]


class DeploymentRow(Base):
    """A deployment (volt/deployments.py). Times in seconds since the epoch. ``source``: who sends, if one host does.

    ``begun``: since when hosts may read. ``predicted``: JSON of the seconds that each method was expected to take, and
    ``why``, for people. ``modelled``: those of the chosen one, before other deployments corrected that.
    """

    __tablename__ = "deployments"

    id: Mapped[int] = mapped_column(primary_key=True)
    image_id: Mapped[int] = mapped_column(sa.ForeignKey("images.id"), index=True)
    size: Mapped[int] = mapped_column(sa.BigInteger)
    digest: Mapped[str] = mapped_column(sa.String(145))
    asked: Mapped[str] = mapped_column(sa.String(32))
    method: Mapped[str] = mapped_column(sa.String(32))
    encrypt: Mapped[bool | None]
    bytes_limit: Mapped[int | None] = mapped_column(sa.BigInteger)
    keep_s: Mapped[int] = mapped_column(sa.BigInteger)
    parallel: Mapped[int]
    source: Mapped[str] = mapped_column(NAME, default="")
    created: Mapped[float] = mapped_column(sa.Float(53))
    ended: Mapped[float | None] = mapped_column(sa.Float(53))
    cancelled: Mapped[bool] = mapped_column(default=False)
    begun: Mapped[float | None] = mapped_column(sa.Float(53))
    predicted: Mapped[str] = mapped_column(sa.Text, default="{}")
    modelled: Mapped[float | None] = mapped_column(sa.Float(53))
    why: Mapped[str] = mapped_column(sa.Text, default="")


class LegRow(Base):
    """The hosts of one site that get an image together, and who sends (volt/legs.py). Times in seconds.

    ``offered``: since when the source is ready, with this ``contact`` and ``attempt``. ``ranges``: JSON. ``pace``:
    bytes a second that links carry of a multicast.
    """

    __tablename__ = "legs"

    id: Mapped[int] = mapped_column(primary_key=True)
    deployment_id: Mapped[int] = mapped_column(sa.ForeignKey("deployments.id"), index=True)
    source: Mapped[str] = mapped_column(NAME)
    attempt: Mapped[str] = mapped_column(sa.String(32), default="")
    contact: Mapped[str] = mapped_column(sa.String(500), default="")
    offered: Mapped[float | None] = mapped_column(sa.Float(53))
    started: Mapped[float | None] = mapped_column(sa.Float(53))
    ended: Mapped[float | None] = mapped_column(sa.Float(53))
    ranges: Mapped[str] = mapped_column(sa.Text, default="[]")
    pace: Mapped[int | None] = mapped_column(sa.BigInteger)
    sent: Mapped[int] = mapped_column(sa.BigInteger, default=0)

    __table_args__ = (
        sa.Index("ix_legs_ended_source", "ended", "source"),
        {"sqlite_autoincrement": True},  # a number is used once: hosts make ports and groups of it
    )


class TransferRow(Base):
    """A host of a deployment. ``number``: its turn. ``ended``: when it said so; until then it is told what to do.

    ``leg_id``: that in which it gets the image, if not from the tree. ``lacks``: JSON of what it lacked then. ``rate``,
    ``delay``, ``link``, ``loss``: see ``TransferReport``.
    """

    __tablename__ = "transfers"

    deployment_id: Mapped[int] = mapped_column(sa.ForeignKey("deployments.id"), primary_key=True)
    host: Mapped[str] = mapped_column(NAME, primary_key=True)  # no foreign key: what was stays when the host goes
    number: Mapped[int]
    state: Mapped[TransferState] = mapped_column(_words(TransferState))
    done: Mapped[int] = mapped_column(sa.BigInteger, default=0)
    total: Mapped[int] = mapped_column(sa.BigInteger, default=0)
    sent: Mapped[int] = mapped_column(sa.BigInteger, default=0)
    error: Mapped[str] = mapped_column(sa.Text, default="")
    leg_id: Mapped[int | None] = mapped_column(sa.ForeignKey("legs.id"), index=True)
    attempt: Mapped[str] = mapped_column(sa.String(32), default="")
    contact: Mapped[str] = mapped_column(sa.String(500), default="")
    lacks: Mapped[str] = mapped_column(sa.Text, default="[]")
    rate: Mapped[float | None] = mapped_column(sa.Float(53))
    delay: Mapped[float | None] = mapped_column(sa.Float(53))
    link: Mapped[float | None] = mapped_column(sa.Float(53))
    loss: Mapped[float | None] = mapped_column(sa.Float(53))
    ended: Mapped[float | None] = mapped_column(sa.Float(53))

    __table_args__ = (sa.Index("ix_transfers_ended_host", "ended", "host"),)


# The columns bear the names of the fields of the tree's own classes, which know of no database. They are not mapped: a
# whole tree is read for a change of it, and rows are several times faster to read than mapped objects.
node_table = sa.Table(
    "nodes",
    Base.metadata,
    sa.Column("image_id", sa.ForeignKey("images.id"), primary_key=True),
    sa.Column("host", sa.ForeignKey("hosts.name"), primary_key=True, index=True),
    sa.Column("slot", sa.Integer, nullable=False),  # unique in effect, but a swap would break a constraint half way
    sa.Column("state", _words(NodeState), nullable=False),
    sa.Column("revision", sa.BigInteger, nullable=False),
    sa.Column("awaited", sa.BigInteger, nullable=False),
    sa.Column("confirmed", sa.BigInteger, nullable=False),
    sa.Column("told", sa.BigInteger, nullable=False),
    sa.Column("returned", sa.BigInteger),
    sa.Column("fetched_bytes", sa.BigInteger, nullable=False),
    sa.Column("sent_bytes", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("parent", NAME),
    sa.Column("whole", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("place", PLACE, nullable=False, server_default=""),
)
departure_table = sa.Table(
    "departures",
    Base.metadata,
    sa.Column("image_id", sa.ForeignKey("images.id"), primary_key=True),
    sa.Column("host", NAME, primary_key=True),  # no foreign key: a removed host may come back
    sa.Column("revision", sa.BigInteger, nullable=False),
    sa.Column("confirmed", sa.BigInteger, nullable=False),
    sa.Column("dropped", sa.Boolean, nullable=False),
    sa.Column("awaited", sa.Boolean, nullable=False),
    sa.Index("ix_departures_host_awaited", "host", "awaited"),
)
edge_key_table = sa.Table(  # one row, made with the table
    "edge_key",
    Base.metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("key", sa.LargeBinary, nullable=False),
)


class Store:
    """A database at an SQLAlchemy URL."""

    def __init__(self, url: str) -> None:
        """Connect and upgrade the tables to what this version needs.

        Raises:
            VoltError: the URL, the database or its tables cannot be used.
        """
        try:
            self._engine = sa.create_engine(url, pool_pre_ping=not url.startswith("sqlite"))
        except (ArgumentError, ImportError) as error:
            raise VoltError(f"cannot use this database URL: {error}") from error
        self._is_sqlite = self._engine.dialect.name == "sqlite"
        # Waiting writers of SQLite sleep and try again. Inside one process they can stand in line instead.
        self._line: Any = threading.Lock() if self._is_sqlite else nullcontext()
        if self._is_sqlite:
            sa.event.listen(self._engine, "connect", _prepare_sqlite)
            sa.event.listen(self._engine, "begin", _begin_sqlite)
        self._writers = {durable: self._engine.execution_options(volt_durable=durable) for durable in (True, False)}
        try:
            self.edge_key = self._upgrade()
            """What edge_secret needs: never to be shown."""
        except CommandError as error:
            self.close()
            raise VoltError(
                f"another version of Volt made the tables of database {self._engine.url!r}: {error};"
                " start that version, or name an empty database"
            ) from error
        except SQLAlchemyError as error:
            self.close()
            reason = str(getattr(error, "orig", None) or error)
            raise VoltError(f"cannot use database {self._engine.url!r}: {reason}") from error

    def close(self) -> None:
        self._engine.dispose()

    @contextmanager
    def write(self, durable: bool = True) -> Iterator[Session]:
        """One transaction that may change things; an exception undoes it.

        What is not ``durable`` may be lost when the power fails (never when Volt dies), and does not wait for the disk.
        """
        with self._line, Session(self._writers[durable], autoflush=False) as session, session.begin():
            yield session

    @contextmanager
    def read(self) -> Iterator[Session]:
        """One transaction that changes nothing."""
        with Session(self._engine) as session:
            yield session

    def check(self) -> None:
        """Raise SQLAlchemyError if the database does not answer."""
        with self.read() as session:
            session.execute(sa.text("SELECT 1"))

    def _upgrade(self) -> bytes:
        """Make the tables what they should be. Returns the key in them."""
        config = Config()
        config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
        with self._line, self._writers[True].begin() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
            key: bytes = connection.execute(sa.select(edge_key_table.c.key)).scalar_one()
            return key


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # transactions begin as _begin_sqlite says
    connection.execute("PRAGMA busy_timeout = 30000")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA foreign_keys = ON")


def _begin_sqlite(connection: sa.Connection) -> None:
    durable = connection.get_execution_options().get("volt_durable")
    if durable is None:
        connection.exec_driver_sql("BEGIN")
        return
    connection.exec_driver_sql(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
    # A transaction that reads first and writes later would fail when another one wrote in between.
    connection.exec_driver_sql("BEGIN IMMEDIATE")


Rows = dict[str, tuple[Any, ...]]


def load_tree(session: Session, image: ImageRow) -> Tree:
    return _tree(image, _rows(session, node_table, image), _rows(session, departure_table, image))


@contextmanager
def changing_tree(session: Session, image: ImageRow, now: float) -> Iterator[Tree]:
    """The tree of an image whose row is new or locked. Changes of the tree are stored at the end.

    ``now``: seconds since the epoch. Revisions are at least its milliseconds: a database from a backup repeats none.
    """
    session.flush()
    nodes, departures = _rows(session, node_table, image), _rows(session, departure_table, image)
    tree = _tree(image, nodes, departures, floor=int(now * 1000))
    yield tree
    image.revision, image.begun = tree.revision, tree.begun
    _store(session, node_table, image, nodes, tree.hosts)
    _store(session, departure_table, image, departures, tree.departures)


def _tree(image: ImageRow, nodes: Rows, departures: Rows, floor: int = 0) -> Tree:
    return Tree(
        image.shape or image.fanout,
        image.revision,
        [Node(*row) for row in nodes.values()],
        [Departure(*row) for row in departures.values()],
        image.begun,
        floor,
        image.home,
    )


def _columns(table: sa.Table) -> list[sa.Column[Any]]:
    """The columns of ``Node`` or ``Departure``, in the order of its fields."""
    return [column for column in table.c if column.name != "image_id"]


def _rows(session: Session, table: sa.Table, image: ImageRow) -> Rows:
    query = sa.select(*_columns(table)).where(table.c.image_id == image.id)
    return {row.host: tuple(row) for row in session.execute(query)}


def _store(
    session: Session, table: sa.Table, image: ImageRow, before: Rows, parts: Mapping[str, Node | Departure]
) -> None:
    """Write the difference."""
    names = [column.name for column in _columns(table)]
    fields = attrgetter(*names)
    after = {host: fields(part) for host, part in parts.items()}
    here = sa.and_(table.c.image_id == image.id, table.c.host == sa.bindparam("at_host"))
    gone = [{"at_host": host} for host in before.keys() - after.keys()]
    new = [dict(zip(names, after[host], strict=True), image_id=image.id) for host in after.keys() - before.keys()]
    changed = [
        dict(zip(names, row, strict=True), at_host=host)
        for host, row in after.items()
        if host in before and row != before[host]
    ]
    for statement, rows in (
        (sa.delete(table).where(here), gone),
        (sa.update(table).where(here), changed),
        (sa.insert(table), new),
    ):
        if rows:
            session.connection().execute(statement, rows)
