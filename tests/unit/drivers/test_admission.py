"""Who is let in, by assignments that come in any order."""

from __future__ import annotations

from testtools import TestCase

from drivers.admission import Admission
from drivers.base import Child
from drivers.errors import DriverError
from tests.doubles.drivers import ExportDouble, Host

OLD, NEW = [Child("old")], [Child("new")]


class AdmissionTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.host = Host()
        self.admission = Admission(ExportDouble(self.host, died=lambda _image: None))

    def assert_in(self, children: list[Child]) -> None:
        self.assertEqual(children, self.host.allowed.get("image", []))

    def test_children_of_an_open_image_change_with_the_assignment(self) -> None:
        self.admission.open("image", 1, OLD)
        self.assert_in(OLD)
        self.admission.update("image", 2, NEW)
        self.assert_in(NEW)

    def test_an_image_without_an_endpoint_gets_none(self) -> None:
        self.admission.update("image", 2, NEW)
        self.assert_in([])

    def test_an_older_assignment_sends_nobody_away(self) -> None:
        self.admission.open("image", 1, OLD)
        self.admission.update("image", 3, NEW)
        self.admission.update("image", 2, OLD)
        self.admission.open("image", 1, OLD)
        self.assert_in(NEW)

    def test_after_it_was_closed_any_assignment_counts(self) -> None:
        self.admission.open("image", 3, OLD)
        self.admission.close("image")
        self.admission.update("image", 4, NEW)
        self.assert_in(OLD)
        self.admission.open("image", 1, NEW)
        self.assert_in(NEW)

    def test_an_assignment_that_failed_counts_when_it_comes_again(self) -> None:
        self.admission.open("image", 1, OLD)
        self.host.failing = {"export.allow": DriverError("stuck")}
        self.assertRaises(DriverError, self.admission.update, "image", 2, NEW)
        self.host.failing = {}
        self.admission.update("image", 2, NEW)
        self.assert_in(NEW)
