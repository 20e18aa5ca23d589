"""Edits to where Horovod listens: a job on one host must not be reachable from another."""

from __future__ import annotations

from horovod_edits.edit import Edit

NETWORK_EDITS = [
    Edit(
        path="horovod/common/gloo/gloo_context.cc",
        old="""\
  attr device_attr;
  device_attr.iface = gloo_iface_;
  device_attr.ai_family = AF_UNSPEC;
  auto dev = CreateDevice(device_attr);

  global_ctx = global_context.ctx;
""",
        new="""\
  gloo_iface_ = global_context.gloo_iface_;
  attr device_attr;
  device_attr.iface = gloo_iface_;
  device_attr.ai_family = AF_UNSPEC;
  auto dev = CreateDevice(device_attr);

  global_ctx = global_context.ctx;
""",
        reason="a process set, and all ranks are one, took the interface of the host's name, not HOROVOD_GLOO_IFACE",
    ),
    Edit(
        path="horovod/runner/http/http_server.py",
        old="""\
    def start(self, handler_cls=RendezvousHandler):
        self._httpd, port = find_port(
            lambda addr: RendezvousHTTPServer(
                addr, handler_cls, self._verbose))
""",
        new="""\
    def start(self, handler_cls=RendezvousHandler, host=''):
        self._httpd, port = find_port(
            lambda addr: RendezvousHTTPServer(
                (host, addr[1]), handler_cls, self._verbose))
""",
        reason="the store has no password; it must listen only where the ranks are told to find it",
    ),
    Edit(
        path="horovod/runner/gloo_run.py",
        old="    global_rendezv_port = rendezvous.start()\n",
        new="    global_rendezv_port = rendezvous.start(host=server_ip)\n",
        reason="the same: 127.0.0.1 where all ranks are on this host",
    ),
]
