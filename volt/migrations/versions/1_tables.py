"""The tables, and the key that the secrets of all edges are made with: all Volts on this database share it."""

from __future__ import annotations

import secrets

import sqlalchemy as sa
from alembic import op

revision = "1"
down_revision = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "hosts",
        sa.Column("name", sa.String(63), primary_key=True),
        sa.Column("address", sa.String(512), nullable=False),
        sa.Column("state", sa.String(16), nullable=False, index=True),
        sa.Column("last_seen", sa.Float(53), nullable=False),
        sa.Column("lease_s", sa.Float(53)),
        sa.Column("agent", sa.String(32), nullable=False),
    )
    op.create_table(
        "images",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("name", sa.String(63), nullable=False, unique=True),
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
        sa.Column("host", sa.String(63), sa.ForeignKey("hosts.name"), primary_key=True, index=True),
        sa.Column("slot", sa.Integer, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.Column("awaited", sa.BigInteger, nullable=False),
        sa.Column("confirmed", sa.BigInteger, nullable=False),
        sa.Column("told", sa.BigInteger, nullable=False),
        sa.Column("returned", sa.BigInteger),
        sa.Column("fetched_bytes", sa.BigInteger, nullable=False),
        sa.Column("parent", sa.String(63)),
    )
    op.create_table(
        "departures",
        sa.Column("image_id", sa.Integer, sa.ForeignKey("images.id"), primary_key=True),
        sa.Column("host", sa.String(63), primary_key=True),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.Column("confirmed", sa.BigInteger, nullable=False),
        sa.Column("dropped", sa.Boolean, nullable=False),
    )
    op.create_table(
        "evictions",
        sa.Column("image_id", sa.Integer, sa.ForeignKey("images.id"), primary_key=True),
        sa.Column("host", sa.String(63), primary_key=True, index=True),
    )
    edge_key = op.create_table(
        "edge_key",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("key", sa.LargeBinary, nullable=False),
    )
    op.bulk_insert(edge_key, [{"id": 1, "key": secrets.token_bytes(32)}])


def downgrade() -> None:
    """Undo."""
    for table in ("edge_key", "evictions", "departures", "nodes", "images", "hosts"):
        op.drop_table(table)
