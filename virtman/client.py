"""The agent's API for Python programs and the command line.

Every method raises the class of ``virtman.errors`` that the agent raised, AgentUnreachable when nobody answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from virtman.errors import BY_KIND, AgentFailed, AgentUnreachable
from virtman.names import check_name, check_path

DEFAULT_SOCKET = Path("/run/virtman/agent.sock")
TIMEOUT = 600.0
"""Seconds that one call may take: an attach may have to wait for a parent."""

Answer = dict[str, Any]
OnProgress = Callable[[str, int, int], None]


class AgentClient:
    """The agent that serves ``socket``. May be shared by threads."""

    def __init__(self, socket: Path = DEFAULT_SOCKET, timeout: float = TIMEOUT) -> None:
        """Nothing is sent yet; ``timeout`` in seconds."""
        self._socket = socket
        # verify: no TLS over a unix socket, and loading the certificate store costs more than the call.
        transport = httpx.HTTPTransport(uds=str(socket), verify=False)
        self._http = httpx.Client(transport=transport, base_url="http://agent", timeout=timeout, trust_env=False)

    def __enter__(self) -> Self:
        """Use the client and close it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connections."""
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def publish(self, name: str, file: Path, on_progress: OnProgress = lambda _step, _done, _total: None) -> Answer:
        """Publish a raw or qcow2 file of this host. Returns name, size and digest.

        ``on_progress`` gets the step, the bytes done and the bytes in all.
        """
        try:
            with self._http.stream("POST", "/v1/images", json={"name": name, "file": str(file)}) as response:
                if response.is_error:
                    response.read()
                    self._raise(response)
                return self._follow(response, on_progress)
        except httpx.TransportError as error:
            raise self._unreachable(error) from error

    def _follow(self, response: httpx.Response, on_progress: OnProgress) -> Answer:
        for line in response.iter_lines():
            message: Answer = json.loads(line)
            if "problem" in message:
                raise _error(message["problem"]["kind"], message["problem"]["detail"])
            if "image" in message:
                image: Answer = message["image"]
                return image
            on_progress(message["step"], message["done"], message["total"])
        raise AgentFailed("the agent ended before the image was published")

    def create(self, vm: str, image: str, size: int | None = None) -> Answer:
        """A disk for a VM, of ``size`` bytes or the image's size; ``path`` in the answer is the disk."""
        return self._object("PUT", _vm_path(vm), {"image": image, "size": size})

    def destroy(self, vm: str) -> None:
        """Remove a VM and its disk for good."""
        self._send("DELETE", _vm_path(vm))

    def vm(self, vm: str) -> Answer:
        """One VM; ``path`` and ``blockdev`` are its disk."""
        return self._object("GET", _vm_path(vm))

    def vms(self) -> list[Answer]:
        """All VMs of the host."""
        vms: list[Answer] = self._send("GET", "/v1/vms").json()
        return vms

    def boot(self, vm: str, image: str, size: int | None = None, **how: Any) -> Answer:
        """Start a VM, creating its disk if needed. ``how``: memory (MiB), cpus, network, ssh_keys, user_data."""
        return self._object("POST", _vm_path(vm) + "/boot", {"image": image, "size": size, **how})

    def stop(self, vm: str, *, force: bool = False) -> None:
        """Shut a VM down; with ``force`` cut its power."""
        self._send("POST", _vm_path(vm) + "/stop", {"force": force})

    def console(self, vm: str) -> Answer:
        """Where the VM's console is: a libvirt URI, a domain and a log file."""
        return self._object("GET", _vm_path(vm) + "/console")

    def volumes(self) -> list[Answer]:
        """The volumes of the cache: path, size, state, images."""
        volumes: list[Answer] = self._send("GET", "/v1/cache/volumes").json()
        return volumes

    def add_volume(self, path: Path) -> Answer:
        """Let the cache use a disk, a partition, or a file that is made."""
        return self._object("POST", "/v1/cache/volumes", {"path": check_path(path)})

    def remove_volume(self, path: Path) -> None:
        """Take a volume from the cache; what it held is fetched anew."""
        self._send("DELETE", f"/v1/cache/volumes?{httpx.QueryParams(path=check_path(path))}")

    def images(self) -> list[Answer]:
        """All published images."""
        images: list[Answer] = self._send("GET", "/v1/images").json()
        return images

    def tree(self, image: str) -> Answer:
        """An image's tree of hosts."""
        return self._object("GET", f"/v1/images/{check_name('image', image)}/tree")

    def status(self) -> Answer:
        """What the host has and does now."""
        return self._object("GET", "/v1/status")

    def gc(self) -> Answer:
        """Remove the stacks and data that nobody needs."""
        return self._object("POST", "/v1/gc")

    def repair(self) -> Answer:
        """Make what the agent's records say true."""
        return self._object("POST", "/v1/repair")

    def suspend(self, *, force: bool = False) -> None:
        """Stop serving every image until the agent is started again."""
        self._send("POST", "/v1/suspend", {"force": force})

    def _object(self, method: str, path: str, body: Answer | None = None) -> Answer:
        answer: Answer = self._send(method, path, body).json()
        return answer

    def _send(self, method: str, path: str, body: Answer | None = None) -> httpx.Response:
        try:
            response = self._http.request(method, path, json=body)
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        if response.is_error:
            self._raise(response)
        return response

    def _unreachable(self, error: httpx.TransportError) -> AgentUnreachable:
        return AgentUnreachable(
            f"no agent answers on {self._socket}: {error}; is 'virtman agent' running, and is the socket yours to use?"
        )

    def _raise(self, response: httpx.Response) -> None:
        try:
            document = response.json()
            kind, detail = document["type"].rpartition(":")[2], document["detail"]
        except (ValueError, KeyError):
            raise AgentFailed(f"the agent answered {response.status_code} without a reason") from None
        raise _error(kind, detail)


def _error(kind: str, detail: str) -> Exception:
    return BY_KIND.get(kind, AgentFailed)(detail)


def _vm_path(vm: str) -> str:
    return "/v1/vms/" + check_name("vm", vm)
