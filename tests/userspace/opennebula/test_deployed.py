"""Images that go to all hosts from their first VM on, because of an attribute of theirs or of their datastore."""

from __future__ import annotations

from lab.opennebula import Image
from tests.patience import wait_until
from tests.userspace.opennebula.cloud import BASE, IMAGES, SYSTEM, CloudTestCase
from volt.deploymodels import Deployment


class DeployedTest(CloudTestCase):
    system = "virtman"

    def setUp(self) -> None:
        super().setUp()
        self.agent = self.cluster.agents[0]
        self.store.attributes["VIRTMAN_METHOD"] = "lazy"

    def deploy(self, image: Image, number: int, host: str) -> str:
        """Deploy a VM, which reads its image. Returns what the driver logs."""
        vm = self.vm(image, number=number)
        answer = self.ok(self.one.deploy(vm, host, SYSTEM))
        self.reads(vm, 0, BASE)
        return "\n".join(answer.log)

    def deployments(self) -> list[Deployment]:
        """All deployments, the newest first."""
        return self.agent.deployments()

    def test_the_first_vm_has_the_image_deployed_and_the_others_do_not(self) -> None:
        image = self.add_image(7, VIRTMAN_METHOD="tree")
        self.deploy(image, 42, "host-1")
        (made,) = self.deployments()
        self.assertEqual("tree", made.asked, "the image's attribute comes first")
        self.assertEqual(sorted(self.cluster.names), sorted(host.host for host in self.agent.deployment(made.id).hosts))
        self.deploy(image, 43, "host-2")
        wait_until(lambda: self.deployments()[0].ended, "the deployment")
        self.assertEqual({"whole"}, {host.state for host in self.agent.deployment(made.id).hosts})
        self.deploy(image, 44, "host-1")
        self.assertEqual([made.id], [one.id for one in self.deployments()])

    def test_the_datastore_says_so_for_the_others_of_its_images(self) -> None:
        self.deploy(self.add_image(7), 42, "host-1")
        self.assertEqual(["lazy"], [one.asked for one in self.deployments()])

    def test_a_vm_starts_lazily_whatever_becomes_of_the_deployment(self) -> None:
        image = self.add_image(7)
        self.store.attributes["VIRTMAN_METHOD"] = "pigeon"
        self.assertIn("'pigeon': it may be one of auto", self.deploy(image, 42, "host-1"))
        file = self.folder / "image-8.raw"
        file.write_bytes(bytes(1 << 20))
        self.refused(self.one.add_image(Image(8, IMAGES, str(file))), "'pigeon': it may be one of auto")
        self.store.attributes["VIRTMAN_METHOD"] = ""
        self.assertEqual("", self.deploy(image, 43, "host-1"))
        self.assertEqual([], self.deployments())
        self.store.attributes["VIRTMAN_METHOD"] = "tree"
        self.cluster.stop_volt()
        self.assertIn("is not deployed: host-1: ", self.deploy(image, 44, "host-1"))
