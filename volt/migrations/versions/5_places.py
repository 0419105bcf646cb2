"""Sites and racks of hosts, and of their nodes in trees."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "5"
down_revision = "4"


def upgrade() -> None:
    for table, column in (("hosts", "place"), ("images", "home"), ("nodes", "place")):
        op.add_column(table, sa.Column(column, sa.String(127), nullable=False, server_default=""))
