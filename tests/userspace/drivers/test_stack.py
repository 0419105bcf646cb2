"""Whole stacks on several hosts: bytes that cross each link, cut-through, and deaths under load."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from drivers.cache.qcow2 import CLUSTER_SIZE
from tests.patience import PATIENCE, wait_until
from tests.programs import require
from tests.userspace.drivers.hosts import MIB, HostCase
from tests.userspace.drivers.relay import Relay

PER_REPLY = 64
"""Bytes of NBD headers per reply, at most: structured replies of one or two chunks."""


class NoParentTest(HostCase):
    """Hosts that start again, as after a reboot, with nobody above them."""

    def setUp(self) -> None:
        super().setUp()
        self.image, self.file, (self.origin, self.host_above, self.host_below) = self.chain(2)
        self.assert_same(self.host_below.uri(self.image), self.file)
        for host in (self.host_below, self.host_above, self.origin):
            host.export.withdraw(self.image.name)
            host.attach.disconnect(self.image.name)

    def test_caches_are_served_without_any_parent(self) -> None:
        self.host_above.join(self.image, [self.origin])
        self.host_below.join(self.image, [self.host_above, self.origin])
        self.assert_same(self.host_below.uri(self.image), self.file)

    def test_reads_beyond_the_cache_wait_for_a_parent(self) -> None:
        self.host_above.cache.remove(self.image.key)
        self.host_above.join(self.image, [self.origin])
        with ThreadPoolExecutor() as pool:
            compared = pool.submit(self.assert_same, self.host_above.uri(self.image), self.file)
            self.assertRaises(TimeoutError, compared.result, 0.3)
            self.origin.serve_file(self.image, self.file)
            compared.result(PATIENCE)
        self.assertEqual(self.image.size, self.host_above.held(self.image))


class OneFetchTest(HostCase):
    """What crosses each link, counted on the wire by a HAProxy in it.

    The first cluster is read at the start: a host that watches its parent reads it, sooner or later.
    """

    def setUp(self) -> None:
        super().setUp()
        require(self, "haproxy")
        self.image, self.file = self.make_image(16 * MIB)
        self.all = self.hosts(4)
        self.all[0].serve_file(self.image, self.file)
        self.relays = []
        for number, host in enumerate(self.all[1:]):
            relay = Relay(self.root / f"relay{number}", self.image, self.all[number])
            self.addCleanup(relay.close)
            self.relays.append(relay)
            host.export.publish(
                self.image, host.cache.open(self.image, host.attach.connect(self.image, [relay.parent]))
            )
        self.read_image(self.all[-1], self.image, 0, 512)

    def assert_once(self, held: int) -> None:
        """Every link carried what the host below holds, once, plus headers."""
        for host in self.all[1:]:
            self.assertEqual(held, host.held(self.image))
        for host in self.all[:0:-1]:  # HAProxy counts a connection when it ends
            host.export.withdraw(self.image.name)
            host.attach.disconnect(self.image.name)
        for relay in self.relays:
            relay.until_idle()
            overhead = relay.sent() - held
            self.assertGreaterEqual(overhead, 0)
            self.assertLess(overhead, PER_REPLY * held // CLUSTER_SIZE + 4096)

    def test_eight_readers_of_one_range_move_it_once(self) -> None:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda _: self.read_image(self.all[-1], self.image, MIB, 4 * MIB), range(8)))
        self.assert_once(CLUSTER_SIZE + 4 * MIB)

    def test_small_read_moves_one_cluster(self) -> None:
        self.read_image(self.all[-1], self.image, 5 * MIB, 512)
        self.assert_once(2 * CLUSTER_SIZE)


class CutThroughTest(HostCase):
    def test_chain_started_from_its_end_is_ready_once_its_beginning_is(self) -> None:
        image, file = self.make_image(MIB)
        hosts = self.hosts(21)
        for host in hosts:
            host.export.reserve(image.name)
        with ThreadPoolExecutor(20) as pool:
            joining = [pool.submit(hosts[number].join, image, [hosts[number - 1]]) for number in range(20, 0, -1)]
            wait_until(lambda: all(len(list((host.place.run / "parent").iterdir())) for host in hosts[1:]))
            self.assertEqual([], [each for each in joining if each.done()])
            hosts[0].serve_file(image, file)
            for each in joining:
                each.result(PATIENCE)
        self.assert_same(hosts[-1].uri(image), file)
