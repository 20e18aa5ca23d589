"""The store in which ranks under horovodrun --gloo find each other. Oracle: its replies to signed requests."""

from __future__ import annotations

from urllib.error import HTTPError

import pytest
from horovod.runner.common.util import hosts, secret
from horovod.runner.http import http_client, http_server


def test_addresses_are_forgotten_when_all_ranks_have_met(monkeypatch):
    """Rank 0 finishes its cross scope, in which it is alone, before rank 1 has finished their local one."""
    monkeypatch.setenv(secret.HOROVOD_JOB_KEY, "k" * 64)
    server = http_server.RendezvousServer()
    port = server.start(host="127.0.0.1")
    try:
        server.init(hosts.get_host_assignments(hosts.parse_hosts("host:2"), 2))
        paths = [f"http://127.0.0.1:{port}/{place}" for place in ("local_host/0", "cross_0/0", "local_host/1")]
        for path in paths:
            http_client._request("PUT", path, b"an address")
        for path in paths:
            http_client._request("DELETE", path)
        for path in paths:
            with pytest.raises(HTTPError, match="404"):
                http_client._request("GET", path)
    finally:
        server.stop()
