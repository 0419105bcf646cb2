"""The tables, and the key that the secrets of all edges are made with.

Until the first release these are the tables of volt/store.py. The first migration after that writes them out here.
"""

from __future__ import annotations

import secrets

from alembic import op

from volt.store import Base, edge_key_table

revision = "2"
down_revision = None


def upgrade() -> None:
    Base.metadata.create_all(op.get_bind())
    op.bulk_insert(edge_key_table, [{"id": 1, "key": secrets.token_bytes(32)}])
