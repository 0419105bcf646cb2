"""Volt as a host sees it, over HTTP."""

from __future__ import annotations

from testtools import TestCase
from testtools.matchers import Contains

from drivers.base import Image
from tests.doubles.drivers import ADDRESS
from tests.doubles.servers import serve_volt, unused_port
from tests.doubles.volt import VoltDouble, digest_of
from virtman.errors import CoordinatorDown, ImageExists, VoltRefused
from virtman.voltlink import VoltLink, translated
from volt import errors as volt_errors
from volt.client import NodeReport, VoltClient

MINE = Image("mine", 1 << 20, digest_of("mine"))


class VoltLinkTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.volt = VoltDouble()
        self.link = self.link_to(serve_volt(self, self.volt))
        self.volt.offer("debian")

    def link_to(self, url: str) -> VoltLink:
        link = VoltLink(VoltClient(url), "here", ADDRESS)
        self.addCleanup(link.close)
        return link

    def test_a_host_that_volt_does_not_know_registers_and_goes_on(self) -> None:
        self.assertEqual("debian", self.link.join("debian").image)
        self.assertEqual({"here": ADDRESS}, self.volt.hosts)

    def test_a_heartbeat_tells_what_is_kept_and_brings_what_may_go(self) -> None:
        self.link.publish(MINE)
        self.link.withdraw("mine", when_unused=True)
        answer = self.link.heartbeat([NodeReport(image="mine", revision=1)], [MINE.digest, digest_of("debian")])
        self.assertEqual((["mine"], [MINE.digest]), (answer.withdrawn, answer.discard))

    def test_this_host_is_an_origin_of_what_volt_lists_as_its_own(self) -> None:
        self.link.publish(MINE)
        self.volt.offer("theirs")
        self.volt.images["debian"].origins.append("here")  # besides another one
        self.assertEqual({"mine", "debian"}, self.link.origins_here())

    def test_the_last_origin_cannot_just_leave(self) -> None:
        self.link.publish(MINE)
        error = self.assertRaises(VoltRefused, self.link.leave, "mine")
        for said in ("only origin of image 'mine'", "volt images remove mine"):
            self.assertThat(str(error), Contains(said))
        self.assertEqual(["here"], self.volt.images["mine"].origins)

    def test_an_image_that_this_host_reads_from_others_cannot_be_published(self) -> None:
        assignment = self.link.join("debian")
        same = Image("debian", assignment.size, assignment.digest)
        self.assertRaises(ImageExists, self.link.publish, same)

    def test_a_volt_in_trouble_is_down(self) -> None:
        self.volt.down = True
        for call in (self.link.images, self.link.origins_here, self.link.register, lambda: self.link.heartbeat([])):
            self.assertRaises(CoordinatorDown, call)
        for named in (self.link.leave, self.link.withdraw):
            self.assertRaises(CoordinatorDown, named, "debian")

    def test_a_volt_that_nobody_runs_is_down(self) -> None:
        link = self.link_to(f"http://127.0.0.1:{unused_port()}")
        self.assertRaises(CoordinatorDown, link.images)

    def test_refusals_keep_their_own_words_and_are_no_volt_that_is_down(self) -> None:
        for refusal in volt_errors.Problem.__subclasses__():
            error = translated(refusal("the reason"))
            self.assertEqual("Volt: the reason", str(error))
            self.assertEqual(refusal.status >= 500, type(error) is CoordinatorDown, refusal.slug)

    def test_answers_that_never_came_or_are_not_volts_mean_that_volt_is_down(self) -> None:
        for error in (volt_errors.VoltUnreachable(""), volt_errors.VoltError("")):
            self.assertIs(CoordinatorDown, type(translated(error)))
