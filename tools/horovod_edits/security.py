"""Edits to what listens while a job starts and runs: only who knows the job's key is heard.

The key is made by horovodrun, for each job anew. Its processes inherit it in their environment; a remote one reads it
from the standard input of its ssh. It is in no command line, where `ps` would show it to everybody.

A request is signed (HMAC-SHA256) in its headers, together with the length and the hash of its body. The signature is
checked before the body is read, and the body before it is parsed. Replies are signed likewise.
"""

from __future__ import annotations

from pathlib import Path

from horovod_edits.edit import Edit

_HMAC = Path(__file__).with_name("inserted").joinpath("hmac_sha256.h").read_text(encoding="utf-8")

_KEY_EDITS = [
    Edit(
        path="horovod/runner/common/util/secret.py",
        old="def make_secret_key():\n",
        new="""\
HOROVOD_JOB_KEY = 'HOROVOD_JOB_KEY'


def job_key():
    \"\"\"The key of this job: inherited, or made by the first process of the job.\"\"\"
    if not os.environ.get(HOROVOD_JOB_KEY):
        os.environ[HOROVOD_JOB_KEY] = make_secret_key().hex()
    return os.environ[HOROVOD_JOB_KEY].encode()


def sign(*parts):
    \"\"\"Signature of some texts with the key of the job, in hexadecimal digits; http_store.cc does the same.\"\"\"
    return compute_digest(job_key(), '\\n'.join(map(str, parts)).encode()).hex()


def make_secret_key():
""",
        reason="one key for all that listens",
    ),
    Edit(
        path="horovod/runner/launch.py",
        old="key=secret.make_secret_key()",
        new="key=secret.job_key()",
        count=2,
        reason="the services that find out which networks the hosts share use it",
    ),
    Edit(
        path="horovod/runner/common/util/settings.py",
        old="        self.prefix_output_with_timestamp = prefix_output_with_timestamp\n",
        new="""\
        self.prefix_output_with_timestamp = prefix_output_with_timestamp

    def __getstate__(self):
        # Settings travel in command lines.
        return {**self.__dict__, 'key': None}
""",
        reason="the key stood in the command lines of ssh and of the helpers on all hosts",
    ),
    Edit(
        path="horovod/runner/task_fn.py",
        old="    settings = codec.loads_base64(sys.argv[4])\n",
        new="    settings = codec.loads_base64(sys.argv[4])\n    settings.key = secret.job_key()\n",
        reason="the helper has it from its environment",
    ),
    Edit(
        path="horovod/runner/task_fn.py",
        old="import codec, host_hash\n",
        new="import codec, host_hash, secret\n",
        reason="for the line above",
    ),
    Edit(
        path="horovod/runner/gloo_run.py",
        old="if env_util.is_exportable(key)]),\n",
        new="if env_util.is_exportable(key) and key != secret.HOROVOD_JOB_KEY]),\n",
        reason="this is a command line as well",
    ),
    Edit(
        path="horovod/runner/gloo_run.py",
        old="import env as env_util, safe_shell_exec\n",
        new="import env as env_util, safe_shell_exec, secret\n",
        reason="for the line above",
    ),
    Edit(
        path="horovod/runner/gloo_run.py",
        old='        run_envs["HOROVOD_ELASTIC"] = "1"\n    return run_envs\n',
        new='        run_envs["HOROVOD_ELASTIC"] = "1"\n'
        "    run_envs[secret.HOROVOD_JOB_KEY] = secret.job_key().decode()\n    return run_envs\n",
        reason="Ray gives its processes these",
    ),
    Edit(
        path="horovod/runner/gloo_run.py",
        old='        [f"{k}={str(v)}" for k, v in env_vars.items()])\n    run_command = (\n',
        new='        [f"{k}={str(v)}" for k, v in env_vars.items() if k != secret.HOROVOD_JOB_KEY])\n    run_command = (\n',
        reason="this is a command line as well",
    ),
    Edit(
        path="horovod/runner/util/remote.py",
        old="def get_remote_command(",
        new="""\
# The shell's own printf and read: the key is in no command line.
SEND_KEY = f'printf "%s\\\\n" "${{{secret.HOROVOD_JOB_KEY}}}" |'
READ_KEY = f"'IFS= read -r {secret.HOROVOD_JOB_KEY}; export {secret.HOROVOD_JOB_KEY};'"


def get_remote_command(""",
        reason="a remote process reads it from standard input",
    ),
    Edit(
        path="horovod/runner/util/remote.py",
        old="""\
    return f'{env_util.KUBEFLOW_MPI_EXEC} {host} {local_command}' if env_util.is_kubeflow_mpi() \\
        else get_ssh_command(local_command, host, port, identity_file, timeout_s)
""",
        new="""\
    secret.job_key()
    if env_util.is_kubeflow_mpi():  # its kubectl passes no standard input on; a pod has no other users
        export = f'export {secret.HOROVOD_JOB_KEY}="${secret.HOROVOD_JOB_KEY}" ";"'
        return f'{env_util.KUBEFLOW_MPI_EXEC} {host} {export} {local_command}'
    return f'{SEND_KEY} {get_ssh_command(f"{READ_KEY} {local_command}", host, port, identity_file, timeout_s)}'
""",
        reason="the same",
    ),
    Edit(
        path="horovod/runner/util/remote.py",
        old="import env as env_util\n",
        new="import env as env_util, secret\n",
        reason="the same",
    ),
]

_STORE_EDITS = [
    Edit(
        path="horovod/runner/http/http_server.py",
        old="class KVStoreHandler(SimpleHTTPRequestHandler):\n",
        new="""\
class KVStoreHandler(BaseHTTPRequestHandler):
    def parse_request(self):
        # Strangers get no further than this; what they sent beside the headers is not read.
        if not super().parse_request():
            return False
        content = self.headers.get(CONTENT_HEADER, '')
        length = self.headers.get('Content-Length', '0')
        expected = secret.sign(self.command, self.path, length, content)
        if hmac.compare_digest(expected.encode(), self.headers.get(SIGNATURE_HEADER, '').encode()):
            return True
        self.close_connection = True
        self.send_response(FORBIDDEN)
        self.end_headers()
        return False

    def reply(self, status, value=b''):
        content = hashlib.sha256(value).hexdigest()
        self.send_response(status)
        self.send_header('Content-Length', str(len(value)))
        self.send_header(CONTENT_HEADER, content)
        self.send_header(SIGNATURE_HEADER, secret.sign('reply', self.command, self.path, status, content))
        self.end_headers()
        self.wfile.write(value)

""",
        reason="signed requests only; and SimpleHTTPRequestHandler answered HEAD with the files of the current folder",
    ),
    Edit(
        path="horovod/runner/http/http_server.py",
        old="""\
            self.send_response(200)
            self.send_header("Content-Length", str(len(value)))
            self.end_headers()
            self.wfile.write(value)
""",
        new="            self.reply(OK, value)\n",
        reason="signs the reply",
    ),
    Edit(
        path="horovod/runner/http/http_server.py",
        old="""\
        self.send_response(status_code)
        self.send_header("Content-Length", 0)
        self.end_headers()
""",
        new="        self.reply(status_code)\n",
        reason="the same",
    ),
    Edit(
        path="horovod/runner/http/http_server.py",
        old="        self._put_value(scope, key, value)\n        self.send_status_code(OK)\n",
        new="""\
        if hashlib.sha256(value).hexdigest() != self.headers[CONTENT_HEADER]:
            self.send_status_code(FORBIDDEN)
            return

        self._put_value(scope, key, value)
        self.send_status_code(OK)
""",
        reason="the body is the one that was signed",
    ),
    Edit(
        path="horovod/runner/http/http_server.py",
        old="BAD_REQUEST = 400\n",
        new="""\
CONTENT_HEADER = 'X-Horovod-Content'
SIGNATURE_HEADER = 'X-Horovod-Signature'

FORBIDDEN = 403
BAD_REQUEST = 400
""",
        reason="what http_store.cc and http_client.py send",
    ),
    Edit(
        path="horovod/runner/http/http_server.py",
        old="import collections\nimport logging\nimport socket\nimport socketserver\nimport threading\n\n"
        "from http.server import HTTPServer, SimpleHTTPRequestHandler\n\n",
        new="import collections\nimport hashlib\nimport hmac\nimport logging\nimport socket\nimport socketserver\n"
        "import sys\nimport threading\n\n"
        "from http.server import BaseHTTPRequestHandler, HTTPServer\n\n"
        "from horovod.runner.common.util import secret\n",
        reason="what the edits above need",
    ),
    Edit(
        path="horovod/runner/http/http_server.py",
        old="class RendezvousHTTPServer(socketserver.ThreadingMixIn, HTTPServer, object):\n",
        new="""\
class ThreadingHTTPServer(socketserver.ThreadingMixIn, HTTPServer):
    # Nobody waits for a stranger who says nothing: no other request, and not the end of the job.
    daemon_threads = True

    def handle_error(self, request, client_address):
        if not isinstance(sys.exc_info()[1], OSError):  # a connection that broke is no fault of ours
            super().handle_error(request, client_address)


class RendezvousHTTPServer(ThreadingHTTPServer):
""",
        reason="a stranger's connection could hold horovodrun, and what he broke was printed as a traceback",
    ),
    Edit(
        path="horovod/runner/http/http_server.py",
        old="class KVStoreHTTPServer(HTTPServer, object):\n",
        new="class KVStoreHTTPServer(ThreadingHTTPServer):\n",
        reason="the same for functions and their results",
    ),
    Edit(
        path="horovod/runner/http/http_server.py",
        old="""\
    def start_server(self):
        self.httpd, port = find_port(
            lambda addr: KVStoreHTTPServer(
                addr, KVStoreHandler, self.verbose))
""",
        new="""\
    def start_server(self, host=''):
        self.httpd, port = find_port(
            lambda addr: KVStoreHTTPServer(
                (host, addr[1]), KVStoreHandler, self.verbose))
""",
        reason="listens where the ranks are told to find it",
    ),
    Edit(
        path="horovod/runner/launch.py",
        old="run_func_server_port = run_func_server.start_server()\n",
        new="run_func_server_port = run_func_server.start_server(driver_ip)\n",
        reason="the same",
    ),
    Edit(
        path="horovod/runner/gloo_run.py",
        old="run_func_server_port = run_func_server.start_server()\n",
        new="run_func_server_port = run_func_server.start_server(server_ip)\n",
        reason="the same",
    ),
    Edit(
        path="horovod/runner/http/http_client.py",
        old="""\
        req = Request(url)
        resp = urlopen(req)
        # TODO: remove base64 encoding because base64 is not efficient
        return codec.loads_base64(resp.read())
""",
        new="        return codec.loads_base64(_request('GET', url))\n",
        reason="signs, and checks before it unpickles",
    ),
    Edit(
        path="horovod/runner/http/http_client.py",
        old="def put_data_into_kvstore(addr, port, scope, key, value):\n",
        new="def put_data_into_kvstore(addr, port, scope, key, value, encode=partial(codec.dumps_base64, to_ascii=False)):\n",
        reason="addresses are put as JSON",
    ),
    Edit(
        path="horovod/runner/http/http_client.py",
        old="""\
        req = Request(url, data=codec.dumps_base64(value, to_ascii=False))
        req.get_method = lambda: "PUT"  # for urllib2 compatibility
        urlopen(req)
""",
        new="        _request('PUT', url, encode(value))\n",
        reason="signs",
    ),
    Edit(
        path="horovod/runner/http/http_client.py",
        old="from horovod.runner.common.util import codec\n",
        new="""\
import hashlib
import hmac
from functools import partial

from horovod.runner.common.util import codec, secret


def _request(method, url, body=b''):
    request = Request(url, data=body or None, method=method)
    content = hashlib.sha256(body).hexdigest()
    request.add_header('X-Horovod-Content', content)
    request.add_header('X-Horovod-Signature', secret.sign(method, request.selector, len(body), content))
    with urlopen(request) as response:
        value = response.read()
        signature = secret.sign('reply', method, request.selector, response.status, hashlib.sha256(value).hexdigest())
        if not hmac.compare_digest(signature, response.headers.get('X-Horovod-Signature', '')):
            raise RuntimeError(f'The reply to {method} {url} is not signed with the key of this job.')
        return value
""",
        reason="a request as http_server.py wants it",
    ),
    # The ranks' side, in C++.
    Edit(
        path="horovod/common/gloo/http_store.cc",
        old='#include "../logging.h"\n',
        new=f'#include "../logging.h"\n\n{_HMAC}',
        reason="HMAC-SHA256",
    ),
    Edit(
        path="horovod/common/gloo/http_store.cc",
        old="""\
http::Response
HTTPStore::PerformHTTP(http::Request& request,
                       const std::string& method = HTTP_GET_METHOD,
                       const std::string& body = "") {
""",
        new="""\
http::Response HTTPStore::PerformHTTP(const std::string& url,
                                      const std::string& method,
                                      const std::string& body) {
  http::Request request(url);
  const std::string path = url.substr(url.find('/', std::strlen("http://")));
  const char* job_key = std::getenv("HOROVOD_JOB_KEY");
  const std::string key = job_key == nullptr ? "" : job_key;
  const std::string content = Hex(Sha256(body));
  const std::string signature =
      HmacSha256(key, method + "\\n" + path + "\\n" +
                          std::to_string(body.size()) + "\\n" + content);
""",
        reason="signs a request",
    ),
    Edit(
        path="horovod/common/gloo/http_store.cc",
        old="""\
      http::Response response = request.send(method, body);
      if (response.status != HTTP_OK && response.status != HTTP_NOT_FOUND) {
        LOG(WARNING) << "HTTP response not OK, got " << response.status;
      } else {
        return response;
      }
""",
        new="""\
      http::Response response =
          request.send(method, body,
                       {"X-Horovod-Content: " + content,
                        "X-Horovod-Signature: " + signature});
      const std::string value(response.body.begin(), response.body.end());
      const std::string expected =
          HmacSha256(key, "reply\\n" + method + "\\n" + path + "\\n" +
                              std::to_string(response.status) + "\\n" +
                              Hex(Sha256(value)));
      if (response.status != HTTP_OK && response.status != HTTP_NOT_FOUND) {
        LOG(WARNING) << "HTTP response not OK, got " << response.status;
      } else if (std::find(response.headers.begin(), response.headers.end(),
                           "X-Horovod-Signature: " + expected) ==
                 response.headers.end()) {
        LOG(WARNING) << "HTTP response is not signed with HOROVOD_JOB_KEY";
      } else {
        return response;
      }
""",
        reason="signs a request, and checks the reply",
    ),
    Edit(
        path="horovod/common/gloo/http_store.cc",
        old="  http::Request request(url);\n\n  http::Response response = PerformHTTP(request, HTTP_GET_METHOD);\n",
        new='  http::Response response = PerformHTTP(url, HTTP_GET_METHOD, "");\n',
        reason="the address is signed as well",
    ),
    Edit(
        path="horovod/common/gloo/http_store.cc",
        old="  http::Request request(url);\n\n  std::string body;\n",
        new="  std::string body;\n",
        reason="the same",
    ),
    Edit(
        path="horovod/common/gloo/http_store.cc",
        old="  PerformHTTP(request, HTTP_PUT_METHOD, body);\n",
        new="  PerformHTTP(url, HTTP_PUT_METHOD, body);\n",
        reason="the same",
    ),
    Edit(
        path="horovod/common/gloo/http_store.cc",
        old="  http::Request request(url);\n  PerformHTTP(request, HTTP_DELETE_METHOD);\n",
        new='  PerformHTTP(url, HTTP_DELETE_METHOD, "");\n',
        reason="the same",
    ),
    Edit(
        path="horovod/common/gloo/http_store.cc",
        old="#include <cstring>\n",
        new="#include <algorithm>\n#include <cstdlib>\n#include <cstring>\n",
        reason="std::find and std::getenv",
    ),
    Edit(
        path="horovod/common/gloo/http_store.h",
        old="  http::Response PerformHTTP(http::Request& request, const std::string& method,\n",
        new="  http::Response PerformHTTP(const std::string& url, const std::string& method,\n",
        reason="the address is signed as well",
    ),
]

_ELASTIC_EDITS = [
    Edit(
        path="horovod/runner/gloo_run.py",
        old="""\
    global_rendezv_port = rendezvous.start(handler)
    driver.wait_for_available_slots(settings.num_proc)

    nics = get_common_interfaces(driver)
    server_ip = network.get_driver_ip(nics)
""",
        new="""\
    driver.wait_for_available_slots(settings.num_proc)

    nics = get_common_interfaces(driver)
    server_ip = network.get_driver_ip(nics)
    global_rendezv_port = rendezvous.start(handler, host=server_ip)
""",
        reason="listened on all interfaces, before it was known which one the ranks use",
    ),
    Edit(
        path="horovod/runner/elastic/rendezvous.py",
        old="""\
                addresses, secret_key = codec.loads_base64(value)
                self._put_worker_addresses(host, int(local_rank), addresses, secret_key)
""",
        new="""\
                addresses = {interface: [(str(ip), int(port)) for ip, port in pairs]
                             for interface, pairs in json.loads(value).items()}
                self._put_worker_addresses(host, int(local_rank), addresses, secret.job_key())
""",
        reason="CVE-2024-10190: unpickled what anybody sent",
    ),
    Edit(
        path="horovod/runner/elastic/rendezvous.py",
        old="import logging\n\nfrom horovod.runner.common.util import codec\n",
        new="import json\nimport logging\n\nfrom horovod.runner.common.util import secret\n",
        reason="the same",
    ),
    Edit(
        path="horovod/runner/elastic/worker.py",
        old="            secret_key = secret.make_secret_key()\n"
        "            self._service = WorkerNotificationService(secret_key, nic, self)\n\n"
        "            value = (self._service.addresses(), secret_key)\n",
        new="            self._service = WorkerNotificationService(secret.job_key(), nic, self)\n",
        reason="a key of its own went through the network in clear text",
    ),
    Edit(
        path="horovod/runner/elastic/worker.py",
        old="                                  self._create_id(hostname, local_rank),\n                                  value)\n",
        new="                                  self._create_id(hostname, local_rank),\n"
        "                                  self._service.addresses(),\n"
        "                                  encode=lambda addresses: json.dumps(addresses).encode())\n",
        reason="JSON in place of pickle",
    ),
    Edit(
        path="horovod/runner/elastic/worker.py",
        old="import os\nimport threading\n",
        new="import json\nimport os\nimport threading\n",
        reason="the same",
    ),
]

_SERVICE_EDITS = [
    Edit(
        path="horovod/runner/common/util/network.py",
        old="""\
    - HMAC digest of the body (32 bytes)
    - length of the body (4 bytes)
    - body
""",
        new="""\
    - HMAC digest of the length (32 bytes)
    - length of the body (4 bytes)
    - HMAC digest of the body (32 bytes)
    - body
""",
        reason="a stranger said how much was read",
    ),
    Edit(
        path="horovod/runner/common/util/network.py",
        old="""\
        digest = secret.compute_digest(self._key, message)
        wfile.write(digest)
        # Pack message length into 4-byte integer.
        wfile.write(struct.pack('i', len(message)))
        wfile.write(message)
""",
        new="""\
        # Pack message length into 4-byte integer.
        for part in (struct.pack('i', len(message)), message):
            wfile.write(secret.compute_digest(self._key, part))
            wfile.write(part)
""",
        reason="the same",
    ),
    Edit(
        path="horovod/runner/common/util/network.py",
        old="""\
        digest = rfile.read(secret.DIGEST_LENGTH)
        # Unpack message length into 4-byte integer.
        message_len = struct.unpack('i', rfile.read(4))[0]
        message = rfile.read(message_len)
        if not secret.check_digest(self._key, message, digest):
            raise Exception('Security error: digest did not match the message.')
        return cloudpickle.loads(message)
""",
        new="""\
        # Unpack message length from 4-byte integer.
        message_len = struct.unpack('i', self._read_signed(rfile, 4))[0]
        return cloudpickle.loads(self._read_signed(rfile, message_len))

    def _read_signed(self, rfile, length):
        digest = rfile.read(secret.DIGEST_LENGTH)
        message = rfile.read(length)
        if not secret.check_digest(self._key, message, digest):
            raise NotSigned('Security error: digest did not match the message.')
        return message
""",
        reason="the same",
    ),
    Edit(
        path="horovod/runner/common/util/network.py",
        old="class PingRequest(object):\n",
        new='class NotSigned(Exception):\n    """A message that the key of this job did not sign."""\n\n\nclass PingRequest(object):\n',
        reason="told from a fault",
    ),
    Edit(
        path="horovod/runner/common/util/network.py",
        old="""\
                try:
                    req = server._wire.read(self.rfile)
                    resp = server._handle(req, self.client_address)
""",
        new="""\
                server._unheard.add(self.request)
                try:
                    req = server._wire.read(self.rfile)
                except (NotSigned, OSError):
                    return  # a stranger, or somebody who went away
                finally:
                    server._unheard.discard(self.request)
                self.request.settimeout(None)
                try:
                    resp = server._handle(req, self.client_address)
""",
        reason="what strangers sent was printed as a traceback",
    ),
    Edit(
        path="horovod/runner/common/util/network.py",
        old="        class _Handler(socketserver.StreamRequestHandler):\n",
        new="        class _Handler(socketserver.StreamRequestHandler):\n            timeout = 10  # seconds, until a request is there\n\n",
        reason="a stranger who says nothing kept a thread",
    ),
    Edit(
        path="horovod/runner/common/util/network.py",
        old="import pickle\nimport psutil\n",
        new="import contextlib\nimport pickle\nimport psutil\n",
        reason="contextlib.suppress",
    ),
    Edit(
        path="horovod/runner/common/util/network.py",
        old="        self._server.shutdown()\n        self._server.server_close()\n",
        new="""\
        self._server.shutdown()
        for stranger in list(self._unheard):
            with contextlib.suppress(OSError):
                stranger.shutdown(socket.SHUT_RDWR)
        self._server.server_close()
""",
        reason="the end waited for the thread of each connection, whether anything ever came or not",
    ),
    Edit(
        path="horovod/runner/common/util/network.py",
        old="""\
        self._nics = nics
        self._server, _ = find_port(
            lambda addr: socketserver.ThreadingTCPServer(
                addr, self._make_handler()))
""",
        new="""\
        self._nics = nics
        self._unheard = set()
        # While horovodrun finds out which interfaces all hosts share, it must listen on each.
        own = [addr.address for nic, addrs in psutil.net_if_addrs().items() for addr in addrs
               if nics and nic in nics and addr.family == socket.AF_INET]
        host = own[0] if len(own) == 1 else ''
        self._server, _ = find_port(
            lambda addr: socketserver.ThreadingTCPServer(
                (host, addr[1]), self._make_handler()))
""",
        reason="listens on the interface in use where that is known",
    ),
]

SECURITY_EDITS = [*_KEY_EDITS, *_STORE_EDITS, *_ELASTIC_EDITS, *_SERVICE_EDITS]
