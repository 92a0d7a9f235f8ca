"""Uploading an export, to a stand-in for the hub that listens on this machine."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from affinage.errors import UserError
from affinage.hub.repository import local_copy, push

TOKEN = "hf_of_the_test"


class _Hub(BaseHTTPRequestHandler):
    """As much of the hub's interface as a small commit uses; keeps what it is sent."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.requests.append((self.path, self.headers.get("Authorization"), body))
        if self.path.endswith("/repos/create"):
            self._answer({"url": f"http://{self.headers['Host']}/me/model", "name": "me/model"})
        elif "/preupload/" in self.path:
            files = [{"path": f["path"], "uploadMode": "regular"} for f in json.loads(body)["files"]]
            self._answer({"files": [entry | {"shouldIgnore": False} for entry in files]})
        elif "/commit/" in self.path:
            self._answer({"commitUrl": f"http://{self.headers['Host']}/me/model/commit/1", "commitOid": "1" * 40})
        else:
            self._answer({})

    def do_GET(self):
        self._answer({"id": "me/model", "siblings": [], "sha": "1" * 40})

    def _answer(self, value):
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    server.requests = []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    server.address = f"http://127.0.0.1:{server.server_port}"
    yield server
    server.shutdown()
    server.server_close()


def test_the_folder_arrives_with_the_token_of_the_environment(hub, tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    assert push(tmp_path, "me/model", endpoint=hub.address).endswith("me/model")
    created = json.loads(next(body for path, _, body in hub.requests if path.endswith("/repos/create")))
    assert created["name"] == "model" and created.get("private", created.get("visibility")) in (True, "private")
    (commit,) = [body for path, _, body in hub.requests if "/commit/" in path]
    sent = {json.loads(line)["value"].get("path") for line in commit.splitlines()}
    assert {"config.json", "README.md"} <= sent
    assert {token for _, token, _ in hub.requests} == {f"Bearer {TOKEN}"}
    said = capsys.readouterr()
    assert TOKEN not in said.out + said.err


def test_without_a_network_it_is_said_what_is_there_and_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(UserError, match="is written, but could not be uploaded") as caught:
        push(tmp_path, "me/model", endpoint="http://127.0.0.1:9")
    assert TOKEN not in str(caught.value) and "hf upload me/model" in str(caught.value)
    with pytest.raises(UserError, match="no repository of that name could be fetched"):
        local_copy("me/there-is-no-such-model")
    with pytest.raises(UserError, match=r"there is no folder `\./nowhere`"):
        local_copy("./nowhere")
