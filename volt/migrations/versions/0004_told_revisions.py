"""Which revision a host was told last, and at which one it was seen last that the store had been set back.

Until a host is told a revision again it may confirm its newest one.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Apply."""
    # Columns are added where the tables are: SQLite cannot copy a table that others refer to.
    op.add_column("nodes", sa.Column("told", sa.BigInteger, nullable=False, server_default="0"))
    op.execute("UPDATE nodes SET told = revision")
    op.add_column("images", sa.Column("begun", sa.BigInteger, nullable=False, server_default="0"))


def downgrade() -> None:
    """Undo."""
    op.drop_column("nodes", "told")
    op.drop_column("images", "begun")
