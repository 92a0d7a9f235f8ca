"""A local server that speaks the protocol of the TPU API, for one zone of one project."""

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

PLACE = "/v2/projects/lab/locations/us-central2-b"


class Cloud:
    """One zone: a queue whose entries take one more state with every question."""

    def __init__(self) -> None:
        self.queue: dict[str, dict] = {}
        self.asked: list[str] = []
        self.wishes: list[dict] = []
        self.course = ["WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"]
        self.busy = 0  # so many answers 503 come first
        self.forget_answer = False  # a POST is carried out, but answered 503
        self.drop = 0  # so many connections end without an answer, each to a request that is carried out

    def answer(self, method: str, target: str, body: dict | None) -> tuple[int, dict]:
        self.asked.append(f"{method} {target}")
        if self.busy:
            self.busy -= 1
            return 503, {"error": {"message": "try again"}}
        url = urlsplit(target)
        if not url.path.startswith(PLACE):
            return 403, {"error": {"message": "permission denied on project"}}
        collection, _, name = url.path.removeprefix(PLACE + "/").partition("/")
        query = parse_qs(url.query)
        if method == "POST":
            (name,) = query["queuedResourceId"]
            if name in self.queue:
                return 409, {"error": {"message": "exists"}}
            self.wishes.append(body or {})
            self.queue[name] = {"course": list(self.course)}
            return (503, {}) if self.forget_answer else (200, {"name": "operations/1"})
        if name not in self.queue:
            return 404, {"error": {"message": "not found"}}
        entry = self.queue[name]
        if method == "DELETE":
            if entry["course"][0] == "ACTIVE" and query.get("force") != ["true"]:
                return 400, {"error": {"message": "it has nodes"}}
            entry["course"] = ["DELETING", ""]
            return 200, {"name": "operations/2"}
        if collection == "nodes":
            ends = [{"ipAddress": f"10.0.0.{n}", "accessConfig": {}} for n in range(4)]
            return 200, {"state": "READY", "networkEndpoints": ends}
        state = entry["course"][0]
        if len(entry["course"]) > 1:
            entry["course"].pop(0)
        if not state:
            del self.queue[name]
            return 404, {"error": {"message": "not found"}}
        failure = {"failedData": {"error": {"message": "no quota"}}} if state == "FAILED" else {}
        return 200, {"state": {"state": state} | failure}


@contextlib.contextmanager
def serving() -> Iterator[tuple[Cloud, str]]:
    cloud = Cloud()

    class Handler(BaseHTTPRequestHandler):
        def _speak(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            status, found = cloud.answer(self.command, self.path, body)
            if cloud.drop:
                cloud.drop -= 1
                self.close_connection = True
                return
            data = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_DELETE = _speak

        def log_message(self, *words: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield cloud, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
