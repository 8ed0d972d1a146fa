"""Services on loopback that tell of machines, with the replies that their documents show."""

import json
import ssl
import threading
import time
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from perdure.adapters.nats import make_certificate


class Service(ThreadingHTTPServer):
    """One metadata service; `with` it runs."""

    daemon_threads = True

    def __init__(self, handler: type["_Handler"]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.requests: list[str] = []
        self.broken = False
        self.changed = threading.Condition()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> Any:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with self.changed:
            self.changed.notify_all()
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def log_message(self, *_: object) -> None:
        pass

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except ConnectionError:  # Whoever asked has gone away.
            self.close_connection = True

    def do_GET(self) -> None:
        self._do()

    do_PUT = do_POST = do_GET

    def _do(self) -> None:
        self.server.requests.append(f"{self.command} {self.path}")
        if self.server.broken:
            self.answer(500, "internal error")
        else:
            self.reply(urlsplit(self.path).path)

    def answer(self, status: int, body: Any, **headers: str) -> None:
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def reply(self, path: str) -> None:
        raise AssertionError(path)


class _Aws(_Handler):
    def reply(self, path: str) -> None:
        server = self.server
        if path == "/latest/api/token":
            if self.command != "PUT" or not self.headers["X-aws-ec2-metadata-token-ttl-seconds"]:
                return self.answer(400, "")
            server.tokens += 1
            return self.answer(200, f"token-{server.tokens}")
        if self.headers["X-aws-ec2-metadata-token"] != f"token-{server.tokens}":
            return self.answer(401, "Unauthorized")
        if path == "/latest/meta-data/spot/instance-action" and server.action:
            return self.answer(200, server.action)
        if path == "/latest/meta-data/events/recommendations/rebalance" and server.rebalance:
            return self.answer(200, server.rebalance)
        return self.answer(404, "Not Found")


class Aws(Service):
    """IMDSv2 of an EC2 spot instance."""

    def __init__(self) -> None:
        super().__init__(_Aws)
        self.tokens = 0
        self.action: dict[str, str] = {}
        self.rebalance: dict[str, str] = {}

    def interrupt(self, in_s: float, action: str = "terminate") -> None:
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + in_s))
        self.action = {"action": action, "time": when}

    def recommend(self) -> None:
        self.rebalance = {"noticeTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}


class _Gcp(_Handler):
    def reply(self, path: str) -> None:
        if self.headers["Metadata-Flavor"] != "Google":
            return self.answer(403, "Missing Metadata-Flavor:Google header")
        server, name = self.server, path.rpartition("/")[2]
        query = parse_qs(urlsplit(self.path).query)
        with server.changed:
            if query.get("wait_for_change") == ["true"]:
                same = query["last_etag"][0]
                patience_s = float(query["timeout_sec"][0])
                server.changed.wait_for(lambda: server.etag(name) != same, patience_s)
            return self.answer(200, server.values[name], ETag=server.etag(name))


class Gcp(Service):
    """The metadata server of a Compute Engine machine."""

    def __init__(self) -> None:
        super().__init__(_Gcp)
        self.values = {"preempted": "FALSE", "maintenance-event": "NONE"}

    def etag(self, name: str) -> str:
        return f"{hash(self.values[name]) & 0xFFFF:x}"

    def set(self, name: str, value: str) -> None:
        with self.changed:
            self.values[name] = value
            self.changed.notify_all()


class _Azure(_Handler):
    def reply(self, path: str) -> None:
        if self.headers["Metadata"] != "true":
            return self.answer(400, "Required metadata header not specified")
        server = self.server
        if path == "/metadata/instance/compute/name":
            return self.answer(200, server.name)
        if path != "/metadata/scheduledevents" or "api-version" not in self.path:
            return self.answer(400, "Bad Request")
        if self.command == "POST":
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.started += [request["EventId"] for request in body["StartRequests"]]
            return self.answer(200, "")
        events = {"DocumentIncarnation": server.incarnation, "Events": server.events}
        return self.answer(200, events)


class Azure(Service):
    """Scheduled events of an Azure virtual machine."""

    def __init__(self, name: str = "vm-1") -> None:
        super().__init__(_Azure)
        self.name, self.incarnation = name, 1
        self.events: list[dict[str, Any]] = []
        self.started: list[str] = []

    def schedule(self, type_: str, in_s: float, *machines: str) -> str:
        id_ = f"C7061BAC-AFDC-4513-B24B-{len(self.events):012}"
        self.incarnation += 1
        self.events.append(
            {
                "EventId": id_,
                "EventType": type_,
                "ResourceType": "VirtualMachine",
                "Resources": list(machines or (self.name,)),
                "EventStatus": "Scheduled",
                "NotBefore": formatdate(time.time() + in_s, usegmt=True),
                "Description": "",
                "EventSource": "Platform",
                "DurationInSeconds": -1,
            }
        )
        return id_


class _Cluster(_Handler):
    def reply(self, path: str) -> None:
        if self.headers["Authorization"] != f"Bearer {self.server.token}":
            return self.answer(403, {"kind": "Status", "reason": "Forbidden"})
        if path != "/api/v1/nodes/gpu-7":
            return self.answer(404, {"kind": "Status", "reason": "NotFound"})
        return self.answer(200, {"kind": "Node", "spec": self.server.spec})


class Cluster(Service):
    """The API server of a Kubernetes with one node, over TLS; `account` is a pod's folder."""

    def __init__(self, account: Path) -> None:
        super().__init__(_Cluster)
        cert, key = make_certificate(str(account), "127.0.0.1")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key)
        self.socket = context.wrap_socket(self.socket, server_side=True)
        (account / "ca.crt").write_text(Path(cert).read_text())
        self.account, self.token = account, "secret"
        (account / "token").write_text("secret\n")
        self.spec: dict[str, Any] = {"podCIDR": "10.0.0.0/24"}

    @property
    def env(self) -> dict[str, str]:
        return {
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": str(self.server_port),
            "PERDURE_NODE_NAME": "gpu-7", "PERDURE_POD_GRACE_S": "60",
        }  # fmt: skip

    def taint(self, key: str) -> None:
        taint = {"key": key, "effect": "NoSchedule", "timeAdded": "2026-11-22T01:00:00Z"}
        self.spec = {**self.spec, "taints": [*self.spec.get("taints", ()), taint]}
