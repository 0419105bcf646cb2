"""The agent's server, and what it tells systemd."""

from __future__ import annotations

import os
import resource
import socket
import threading

import httpx
from flask import Flask
from testtools import TestCase

from tests.unit.virtman.scene import folder_for
from virtman.server import listen, tell_ready

FD_SETSIZE = 1024
"""As many files select(2) takes."""
SOON = 10.0


class ListenTest(TestCase):
    def test_calls_are_answered_while_an_agent_has_many_open_files(self) -> None:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.addCleanup(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        resource.setrlimit(resource.RLIMIT_NOFILE, (2 * FD_SETSIZE, limits[1]))
        for _ in range(FD_SETSIZE):
            self.addCleanup(os.close, os.open(os.devnull, os.O_RDONLY))
        path = folder_for(self) / "agent.sock"
        app = Flask("empty")
        app.config["MAX_CONTENT_LENGTH"] = 1
        server = listen(app, path, 1)
        thread = threading.Thread(target=server.run)
        thread.start()
        self.addCleanup(thread.join, SOON)
        self.addCleanup(server.trigger.pull_trigger, server.close)
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=SOON) as client:
            self.assertEqual(404, client.get("http://agent/").status_code)


class TellReadyTest(TestCase):
    def listener(self, address: str) -> socket.socket:
        listener = self.enterContext(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        listener.settimeout(10)
        listener.bind(address)
        return listener

    def test_systemd_hears_it_also_at_an_address_without_a_file(self) -> None:
        path, name = str(folder_for(self) / "notify"), f"virtman-test-{folder_for(self).name}"
        for address, told in ((path, path), (f"\0{name}", f"@{name}")):
            listener = self.listener(address)
            tell_ready(told)
            self.assertEqual(b"READY=1", listener.recv(100))

    def test_nobody_to_tell_is_fine(self) -> None:
        tell_ready("")
        tell_ready(str(folder_for(self) / "gone"))
