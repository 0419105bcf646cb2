"""The names of the images that images were made of."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "4"
down_revision = "3"


def upgrade() -> None:
    op.add_column("images", sa.Column("parent", sa.String(63)))
