"""Nova's pre-caching of images leads to their bases."""

from __future__ import annotations

from types import SimpleNamespace

from tests.openstack.computes import GLANCE_IMAGE, ComputesTest


class PrecacheTest(ComputesTest):
    """Both computes have one folder of images: what the first has got is there for the second."""

    def setUp(self) -> None:
        super().setUp()
        self.stub_out("nova.privsep.path.utime", lambda _path: None)  # by which Nova marks an image that is there

    def cache(self, node: str) -> str:
        """Have a host cache the image, and say how that went."""
        (said,) = self.computes[node].manager.cache_images(self.admin, [GLANCE_IMAGE]).values()
        return str(said)

    def whole(self, node: str) -> list[str]:
        """The images that a host, which is no origin, keeps as a whole."""
        stacks = self.agent(node).status().images
        return [one.name for one in stacks if one.role != "origin" and one.hydration and one.hydration.whole]

    def test_hosts_that_are_to_cache_an_image_keep_all_of_the_bases_that_were_made_of_it(self) -> None:
        other_base = self.cinder.add(self.file)
        self.cinder.volumes[other_base]["volume_image_metadata"]["image_id"] = "another"
        origin, other = self.cluster.names
        self.assertEqual("cached", self.cache(origin))
        self.assertEqual({self.image(): [origin]}, self.images())
        self.assertEqual("existing", self.cache(origin))
        self.assertEqual("cached", self.cache(other), "Nova's own copy was there, and the base was not")
        self.assertEqual([self.image()], self.whole(other))
        self.assertEqual("existing", self.cache(other))
        self.assertEqual([], self.all_disks())

        del self.cinder.volumes[self.volume]["volume_metadata"]["virtman_base"]
        self.let_stacks_go()
        self.assertEqual({}, self.cinder.attachments, "a host that keeps a base does not hold up its end")

    def test_a_base_that_cannot_be_kept_is_logged_and_the_image_is_cached(self) -> None:
        origin, other = self.cluster.names
        self.cache(origin)
        failed = SimpleNamespace(state="failed", error="there is no room")
        for answer, timeout, why in (
            (SimpleNamespace(ended=True, hosts=[failed]), 1800, "is not whole here: there is no room"),
            (SimpleNamespace(ended=False), 0, "is not whole yet; deployment "),
        ):
            self.flags(long_rpc_timeout=timeout)
            self.stub_out("virtman.client.AgentClient.deployment", lambda *_, answer=answer: answer)
            self.logs(other, why)
        self.cluster.stop_volt()
        self.logs(other, "Volt: ")

    def logs(self, node: str, why: str) -> None:
        """A host that has Nova's own copy does not keep the base, and says why."""
        self.assertEqual("existing", self.cache(node))
        said = self.stdlog.logger.output.splitlines()
        warnings = [line for line in said if f"not all bases of image {GLANCE_IMAGE} are kept whole: VirtMan: " in line]
        self.assertIn(why, warnings[-1])
