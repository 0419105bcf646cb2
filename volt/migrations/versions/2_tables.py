"""The tables of 0.3.0, and the key that the secrets of all edges are made with.

A change of volt/store.py comes with another migration; this one stays as it is.
"""

from __future__ import annotations

import secrets

import sqlalchemy as sa
from alembic import op

revision = "2"
down_revision = None

NAME = sa.String(63)
STATE = sa.String(16)


def upgrade() -> None:
    op.create_table(
        "hosts",
        sa.Column("name", NAME, primary_key=True),
        sa.Column("address", sa.String(512), nullable=False),
        sa.Column("state", STATE, nullable=False, index=True),
        sa.Column("last_seen", sa.Float(53), nullable=False),
        sa.Column("lease_s", sa.Float(53)),
        sa.Column("agent", sa.String(32), nullable=False),
    )
    op.create_table(
        "images",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("name", NAME, nullable=False, unique=True),
        sa.Column("published", sa.Boolean, nullable=False),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("digest", sa.String(145), nullable=False, index=True),
        sa.Column("fanout", sa.Integer, nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.Column("begun", sa.BigInteger, nullable=False),
        sa.Column("withdrawn", sa.Boolean, nullable=False),
    )
    op.create_table(
        "nodes",
        sa.Column("image_id", sa.Integer, sa.ForeignKey("images.id"), primary_key=True),
        sa.Column("host", NAME, sa.ForeignKey("hosts.name"), primary_key=True, index=True),
        sa.Column("slot", sa.Integer, nullable=False),
        sa.Column("state", STATE, nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.Column("awaited", sa.BigInteger, nullable=False),
        sa.Column("confirmed", sa.BigInteger, nullable=False),
        sa.Column("told", sa.BigInteger, nullable=False),
        sa.Column("returned", sa.BigInteger),
        sa.Column("fetched_bytes", sa.BigInteger, nullable=False),
        sa.Column("parent", NAME),
    )
    op.create_table(
        "departures",
        sa.Column("image_id", sa.Integer, sa.ForeignKey("images.id"), primary_key=True),
        sa.Column("host", NAME, primary_key=True),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.Column("confirmed", sa.BigInteger, nullable=False),
        sa.Column("dropped", sa.Boolean, nullable=False),
        sa.Column("awaited", sa.Boolean, nullable=False),
        sa.Index("ix_departures_host_awaited", "host", "awaited"),
    )
    edge_key = op.create_table(
        "edge_key", sa.Column("id", sa.Integer, primary_key=True), sa.Column("key", sa.LargeBinary, nullable=False)
    )
    op.bulk_insert(edge_key, [{"id": 1, "key": secrets.token_bytes(32)}])
