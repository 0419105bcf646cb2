"""The lease that each host was told. Who was told one before has the lease of now until it is told again."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Apply."""
    op.add_column("hosts", sa.Column("lease_s", sa.Float(53)))


def downgrade() -> None:
    """Undo."""
    op.drop_column("hosts", "lease_s")
