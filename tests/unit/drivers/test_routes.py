"""The routes of an attach driver."""

from __future__ import annotations

from testtools import TestCase

from drivers.attach.routes import Routes
from drivers.errors import BadName, NotAttached


class FakeRoute:
    """Counts how often it was closed."""

    closed = 0

    def close(self) -> None:
        self.closed += 1


class RoutesTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.routes: Routes[FakeRoute] = Routes()

    def test_an_added_route_is_found(self) -> None:
        route = self.routes.add("debian", FakeRoute())
        self.assertIs(route, self.routes.of("debian"))
        self.assertIsNone(self.routes.find("other"))

    def test_no_route_is_an_error_that_names_the_image(self) -> None:
        error = self.assertRaises(NotAttached, self.routes.of, "debian")
        self.assertIn("debian", str(error))

    def test_bad_names_are_refused(self) -> None:
        for call in (self.routes.find, self.routes.of, self.routes.drop):
            self.assertRaises(BadName, call, "../debian")

    def test_a_dropped_route_is_closed_once(self) -> None:
        route = self.routes.add("debian", FakeRoute())
        self.routes.drop("debian")
        self.routes.drop("debian")
        self.assertEqual((1, None), (route.closed, self.routes.find("debian")))

    def test_all_are_closed(self) -> None:
        routes = [self.routes.add(name, FakeRoute()) for name in ("one", "two")]
        self.routes.close()
        self.assertEqual([1, 1], [route.closed for route in routes])
