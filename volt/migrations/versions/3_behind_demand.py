"""Hosts that have all of an image, and what VMs read while they boot."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "3"
down_revision = "2"


def upgrade() -> None:
    op.add_column("nodes", sa.Column("whole", sa.Boolean, nullable=False, server_default=sa.false()))
    op.create_table(
        "boot_sets",
        sa.Column("digest", sa.String(145), primary_key=True),
        sa.Column("ranges", sa.Text, nullable=False),
        sa.Column("boots", sa.Integer, nullable=False),
    )
