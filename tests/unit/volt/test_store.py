"""The database: migrations, transactions, what it refuses."""

from __future__ import annotations

import random

from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, text
from sqlalchemy.exc import IntegrityError
from testtools import ExpectedException, TestCase

from tests.unit.virtman.scene import folder_for
from volt.errors import VoltError
from volt.models import HostState
from volt.store import Base, HostRow, ImageRow, Store, changing_tree, load_tree
from volt.tree import Tree


def host(name: str) -> HostRow:
    return HostRow(name=name, address="unix:///run/x", state=HostState.ALIVE, last_seen=0.0)


class StoreCase(TestCase):
    """A store in a folder."""

    def setUp(self) -> None:
        """Make it."""
        super().setUp()
        self.url = f"sqlite:///{folder_for(self)}/volt.db"
        self.store = self.open()

    def open(self) -> Store:
        store = Store(self.url)
        self.addCleanup(store.close)
        return store

    def names(self) -> list[str]:
        with self.store.read() as session:
            return [row.name for row in session.query(HostRow).order_by(HostRow.name)]

    def test_the_migrations_make_the_tables_that_the_code_has(self) -> None:
        with create_engine(self.url).connect() as connection:
            self.assertEqual([], compare_metadata(MigrationContext.configure(connection), Base.metadata))

    def test_an_exception_undoes_the_transaction(self) -> None:
        def fail() -> None:
            with self.store.write() as session:
                session.add(host("a"))
                session.flush()
                raise ZeroDivisionError

        self.assertRaises(ZeroDivisionError, fail)
        self.assertEqual([], self.names())

    def test_what_is_durable_waits_for_the_disk_and_nothing_else_does(self) -> None:
        for durable, synchronous in ((True, 2), (False, 1), (True, 2)):  # FULL and NORMAL, sqlite.org/pragma.html
            with self.store.write(durable) as session:
                self.assertEqual(synchronous, session.execute(text("PRAGMA synchronous")).scalar())

    def test_who_reads_waits_for_no_writer(self) -> None:
        with self.store.write() as session:
            session.add(host("a"))
            session.flush()
            self.assertEqual([], self.names())

    def test_what_belongs_to_no_image_is_refused(self) -> None:
        with ExpectedException(IntegrityError), self.store.write() as session:
            session.execute(text("INSERT INTO departures VALUES (7, 'a', 7, 6, true, false)"))

    def test_a_database_of_another_version_is_refused(self) -> None:
        with self.store.write() as session:
            session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
        error = self.assertRaises(VoltError, Store, self.url)
        self.assertIn("another version of Volt made the tables", str(error))

    def test_the_key_is_made_once(self) -> None:
        self.assertEqual(32, len(self.store.edge_key))
        self.assertEqual(self.store.edge_key, self.open().edge_key)

    def test_a_database_without_its_key_is_refused(self) -> None:
        with self.store.write() as session:
            session.execute(text("DELETE FROM edge_key"))
        self.assertRaises(VoltError, Store, self.url)

    def test_a_password_is_not_in_the_error(self) -> None:
        url = "sqlite://user:secret@host/none"
        self.assertNotIn("secret", str(self.assertRaises(VoltError, Store, url)))

    def test_a_tree_that_is_stored_after_each_step_is_the_tree_that_never_was(self) -> None:
        image = ImageRow(name="image", published=True, size=512, digest="", fanout=2, revision=0)
        plain, steps = Tree(2), random.Random(7)
        with self.store.write() as session:
            session.add_all([image, *(host(f"h{number}") for number in range(12))])
            session.flush()
            key = image.id
        for step in range(150):
            name = f"h{steps.randrange(12)}"
            with self.store.write() as session, changing_tree(session, session.get_one(ImageRow, key), 0) as stored:
                for tree in (plain, stored):
                    _change(tree, name, step)
        with self.store.read() as session:
            self.assertEqual(_facts(plain), _facts(load_tree(session, session.get_one(ImageRow, key))))


def _change(tree: Tree, name: str, step: int) -> None:
    """Something that depends on the tree's state, on the name and on the step only."""
    node = tree.hosts.get(name)
    if not tree.hosts:
        tree.publish(name)
    elif node is None:
        tree.join(name)
    elif step % 3 == 0 and node.slot > 0:
        tree.leave(name, dropped=node.awaited if step % 2 else -1)
    elif step % 7 == 0:
        tree.suspect(name, tree.parents(node)[0] if node.slot > 0 else name)
    else:
        node.fetched_bytes += 1
        tree.confirm(name, tree.tell(name).revision)


def _facts(tree: Tree) -> tuple[int, list[str], list[str]]:
    return (
        tree.revision,
        sorted(str(vars(node)) for node in tree.hosts.values()),
        sorted(str(vars(departure)) for departure in tree.departures.values()),
    )
