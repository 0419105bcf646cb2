"""The first tables: hosts, images, nodes, departures."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "hosts",
        sa.Column("name", sa.String(63), primary_key=True),
        sa.Column("address", sa.String(512), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("last_seen", sa.Float(53), nullable=False),
    )
    op.create_index("ix_hosts_state", "hosts", ["state"])
    op.create_table(
        "images",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("name", sa.String(63), nullable=False, unique=True),
        sa.Column("published", sa.Boolean, nullable=False),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("digest", sa.String(71), nullable=False),
        sa.Column("fanout", sa.Integer, nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "nodes",
        sa.Column("image_id", sa.Integer, sa.ForeignKey("images.id"), primary_key=True),
        sa.Column("host", sa.String(63), sa.ForeignKey("hosts.name"), primary_key=True),
        sa.Column("slot", sa.Integer, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.Column("awaited", sa.BigInteger, nullable=False),
        sa.Column("confirmed", sa.BigInteger, nullable=False),
        sa.Column("returned", sa.BigInteger),
        sa.Column("fetched_bytes", sa.BigInteger, nullable=False),
        sa.Column("parent", sa.String(63)),
    )
    op.create_index("ix_nodes_host", "nodes", ["host"])
    op.create_table(
        "departures",
        sa.Column("image_id", sa.Integer, sa.ForeignKey("images.id"), primary_key=True),
        sa.Column("host", sa.String(63), primary_key=True),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.Column("confirmed", sa.BigInteger, nullable=False),
    )


def downgrade() -> None:
    """Undo."""
    for table in ("departures", "nodes", "images", "hosts"):
        op.drop_table(table)
