"""Deployments, and the shape that a tree has meanwhile."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "6"
down_revision = "5"


def upgrade() -> None:
    op.add_column("images", sa.Column("shape", sa.Integer))
    op.create_table(
        "deployments",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("image_id", sa.Integer, sa.ForeignKey("images.id"), nullable=False, index=True),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("digest", sa.String(145), nullable=False),
        sa.Column("asked", sa.String(32), nullable=False),
        sa.Column("method", sa.String(32), nullable=False),
        sa.Column("encrypt", sa.Boolean),
        sa.Column("bytes_limit", sa.BigInteger),
        sa.Column("keep_s", sa.BigInteger, nullable=False),
        sa.Column("parallel", sa.Integer, nullable=False),
        sa.Column("source", sa.String(63), nullable=False),
        sa.Column("created", sa.Float(53), nullable=False),
        sa.Column("ended", sa.Float(53)),
        sa.Column("cancelled", sa.Boolean, nullable=False),
        sa.Column("begun", sa.Float(53)),
        sa.Column("predicted", sa.Text, nullable=False),
        sa.Column("modelled", sa.Float(53)),
        sa.Column("why", sa.Text, nullable=False),
    )
    op.add_column("nodes", sa.Column("sent_bytes", sa.BigInteger, nullable=False, server_default="0"))
    op.add_column("hosts", sa.Column("methods", sa.String(1100), nullable=False, server_default=""))
    op.create_table(
        "legs",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("deployment_id", sa.Integer, sa.ForeignKey("deployments.id"), nullable=False, index=True),
        sa.Column("source", sa.String(63), nullable=False),
        sa.Column("attempt", sa.String(32), nullable=False),
        sa.Column("contact", sa.String(500), nullable=False),
        sa.Column("offered", sa.Float(53)),
        sa.Column("started", sa.Float(53)),
        sa.Column("ended", sa.Float(53)),
        sa.Column("ranges", sa.Text, nullable=False),
        sa.Column("pace", sa.BigInteger),
        sa.Column("sent", sa.BigInteger, nullable=False),
        sa.Index("ix_legs_ended_source", "ended", "source"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "transfers",
        sa.Column("deployment_id", sa.Integer, sa.ForeignKey("deployments.id"), primary_key=True),
        sa.Column("host", sa.String(63), primary_key=True),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("done", sa.BigInteger, nullable=False),
        sa.Column("total", sa.BigInteger, nullable=False),
        sa.Column("sent", sa.BigInteger, nullable=False),
        sa.Column("error", sa.Text, nullable=False),
        sa.Column("leg_id", sa.Integer, sa.ForeignKey("legs.id"), index=True),
        sa.Column("attempt", sa.String(32), nullable=False),
        sa.Column("contact", sa.String(500), nullable=False),
        sa.Column("lacks", sa.Text, nullable=False),
        sa.Column("rate", sa.Float(53)),
        sa.Column("delay", sa.Float(53)),
        sa.Column("link", sa.Float(53)),
        sa.Column("loss", sa.Float(53)),
        sa.Column("ended", sa.Float(53)),
        sa.Index("ix_transfers_ended_host", "ended", "host"),
    )
