"""The key that the secrets of all edges are made with. It is made here, once: all Volts on this database share it."""

from __future__ import annotations

import secrets

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Apply."""
    table = op.create_table(
        "edge_key",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("key", sa.LargeBinary, nullable=False),
    )
    op.bulk_insert(table, [{"id": 1, "key": secrets.token_bytes(32)}])


def downgrade() -> None:
    """Undo."""
    op.drop_table("edge_key")
