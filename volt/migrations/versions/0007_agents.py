"""Which agent has a host's name. The first agent that names itself after the upgrade gets the name."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Apply."""
    op.add_column("hosts", sa.Column("agent", sa.String(32), nullable=False, server_default=""))


def downgrade() -> None:
    """Undo."""
    op.drop_column("hosts", "agent")
