"""Images that are withdrawn while hosts have them, and which hosts were evicted with which images.

Nothing is known of who was evicted before.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Apply."""
    op.add_column("images", sa.Column("withdrawn", sa.Boolean, nullable=False, server_default=sa.false()))
    op.create_index("ix_images_digest", "images", ["digest"])
    op.create_table(
        "evictions",
        sa.Column("image_id", sa.Integer, sa.ForeignKey("images.id"), primary_key=True),
        sa.Column("host", sa.String(63), primary_key=True),
    )
    op.create_index("ix_evictions_host", "evictions", ["host"])


def downgrade() -> None:
    """Undo."""
    op.drop_table("evictions")
    op.drop_index("ix_images_digest", "images")
    op.drop_column("images", "withdrawn")
