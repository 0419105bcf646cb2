"""Nova's pre-caching of images leads to their bases."""

from __future__ import annotations

from tests.openstack.computes import GLANCE_IMAGE, ComputesTest


class PrecacheTest(ComputesTest):
    COMPUTES = 1

    def test_a_host_that_is_to_cache_an_image_attaches_the_bases_that_were_made_of_it(self) -> None:
        other = self.cinder.add(self.file)
        self.cinder.volumes[other]["volume_image_metadata"]["image_id"] = "another"
        (node,) = self.cluster.names
        self.computes[node].manager.cache_images(self.admin, [GLANCE_IMAGE])
        self.assertEqual({self.image(): [node]}, self.images())
        self.assertEqual([], self.all_disks())
