"""Whether a host that left had dropped its parents. Nothing is known of those that left before."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Apply."""
    with op.batch_alter_table("departures") as departures:
        departures.add_column(sa.Column("dropped", sa.Boolean, nullable=False, server_default=sa.false()))
    with op.batch_alter_table("departures") as departures:
        departures.alter_column("dropped", server_default=None)


def downgrade() -> None:
    """Undo."""
    with op.batch_alter_table("departures") as departures:
        departures.drop_column("dropped")
