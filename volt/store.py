"""What Volt keeps: hosts, images, nodes, departures. Parents are not stored; they follow from the slots.

Each use is one short transaction. Writers of one image exclude each other by a lock on the image's row, writers of one
host by a lock on the host's row, taken in the order host, then images by id.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Enum,
    Float,
    ForeignKey,
    Integer,
    String,
    Table,
    create_engine,
    event,
    text,
)
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship

from volt.errors import StoreUnusable
from volt.models import HostState, NodeState
from volt.tree import Departure, Node

MIGRATIONS = Path(__file__).with_name("migrations")
NAME = String(63)


def _words(kind: type[HostState] | type[NodeState]) -> Enum:
    return Enum(
        kind, native_enum=False, create_constraint=False, length=16, values_callable=lambda e: [m.value for m in e]
    )


class Base(DeclarativeBase):
    """The tables."""


class HostRow(Base):
    """A registered host. ``last_seen``: seconds since the epoch."""

    __tablename__ = "hosts"

    name: Mapped[str] = mapped_column(NAME, primary_key=True)
    address: Mapped[str] = mapped_column(String(512))
    state: Mapped[HostState] = mapped_column(_words(HostState), index=True)
    last_seen: Mapped[float] = mapped_column(Float(53))


class ImageRow(Base):
    """An image. The row outlives the image, so that revisions under one name never start again from the beginning.

    ``fanout`` is that of the time of publishing: another one would turn all parents of a living tree around at once.
    """

    __tablename__ = "images"

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    name: Mapped[str] = mapped_column(NAME, unique=True)
    published: Mapped[bool] = mapped_column(Boolean)
    size: Mapped[int] = mapped_column(BigInteger)
    digest: Mapped[str] = mapped_column(String(71))
    fanout: Mapped[int] = mapped_column(Integer)
    revision: Mapped[int] = mapped_column(BigInteger)
    nodes: Mapped[list[Node]] = relationship(cascade="all, delete-orphan")
    departures: Mapped[list[Departure]] = relationship(cascade="all, delete-orphan")


# The tree's own classes are mapped onto their tables from outside: the tree knows of no database.
node_table = Table(
    "nodes",
    Base.metadata,
    Column("image_id", ForeignKey("images.id"), primary_key=True),
    Column("host", ForeignKey("hosts.name"), primary_key=True, index=True),
    Column("slot", Integer, nullable=False),  # unique in effect, but a swap would break a constraint half way
    Column("state", _words(NodeState), nullable=False),
    Column("revision", BigInteger, nullable=False),
    Column("awaited", BigInteger, nullable=False),
    Column("confirmed", BigInteger, nullable=False),
    Column("returned", BigInteger),
    Column("fetched_bytes", BigInteger, nullable=False),
    Column("parent", NAME),
)
departure_table = Table(
    "departures",
    Base.metadata,
    Column("image_id", ForeignKey("images.id"), primary_key=True),
    Column("host", NAME, primary_key=True),  # no foreign key: who was removed may come back
    Column("revision", BigInteger, nullable=False),
    Column("confirmed", BigInteger, nullable=False),
)
Base.registry.map_imperatively(Node, node_table)
Base.registry.map_imperatively(Departure, departure_table)


class Store:
    """A database at an SQLAlchemy URL."""

    def __init__(self, url: str) -> None:
        """Connect and upgrade the tables to what this version needs.

        Raises:
            StoreUnusable: the URL, the database or its tables cannot be used.
        """
        try:
            self._engine = create_engine(url, pool_pre_ping=not url.startswith("sqlite"))
        except (ArgumentError, ImportError) as error:
            raise StoreUnusable(f"cannot use this database URL: {error}") from error
        self._is_sqlite = self._engine.dialect.name == "sqlite"
        # Waiting writers of SQLite sleep and try again. Inside one process they can stand in line instead.
        self._line: Any = threading.Lock() if self._is_sqlite else nullcontext()
        if self._is_sqlite:
            event.listen(self._engine, "connect", _prepare_sqlite)
            event.listen(self._engine, "begin", _begin_sqlite)
        self._writer = self._engine.execution_options(volt_writes=True)
        try:
            self._upgrade()
        except (SQLAlchemyError, CommandError) as error:
            self.close()
            reason = str(getattr(error, "orig", None) or error)
            raise StoreUnusable(f"cannot use database {self._engine.url!r}: {reason}") from error

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()

    def connect(self) -> Connection:
        """A connection outside the two kinds of use below."""
        return self._engine.connect()

    @contextmanager
    def write(self) -> Iterator[Session]:
        """One transaction that may change things; an exception undoes it."""
        with self._line, Session(self._writer) as session, session.begin():
            yield session

    @contextmanager
    def read(self) -> Iterator[Session]:
        """One transaction that changes nothing."""
        with Session(self._engine) as session:
            yield session

    def check(self) -> None:
        """Ask the database something.

        Raises:
            SQLAlchemyError: it does not answer.
        """
        with self.read() as session:
            session.execute(text("SELECT 1"))

    def _upgrade(self) -> None:
        config = Config()
        config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
        with self._line, self._writer.begin() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, "head")


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # transactions begin as _begin_sqlite says
    for pragma in ("journal_mode = WAL", "busy_timeout = 5000", "foreign_keys = ON", "synchronous = FULL"):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: Connection) -> None:
    # A transaction that reads first and writes later would fail when another one wrote in between.
    writes = connection.get_execution_options().get("volt_writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
