"""A server of the Hugging Face Hub's protocol in this process, on the loopback address.

Large files are answered, as there, with the way to another host, which is asked without a token.
"""

import contextlib
import hashlib
import json
import logging
import re
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from werkzeug import Request, Response
from werkzeug.serving import make_server

from source_forms import bytes_of

_STORED_APART = (".parquet", ".safetensors", ".gz")
_API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+?)(?:/(revision|tree|paths-info)(.*))?")
_FILE = re.compile(r"(?:/(datasets))?/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Fault:
    """What goes wrong with requests whose path matches `path`, so many `times`."""

    path: str  # a regular expression
    status: int = 0  # instead of the answer
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: int | None = None  # bytes of the answer's body, after which the connection ends
    silence: float = 0.0  # seconds before the answer
    times: int = 1


@dataclass
class SeenRequest:
    """What was asked, and of whom: the Hub, or the host of its large files."""

    path: str
    token: str | None
    range: str | None
    apart: bool


class Hub:
    """Repositories, the faults to come, and what was asked."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, dict[str, bytes]]] = {}  # by the id of each commit all its files
        self.faults: list[Fault] = []
        self.requests: list[SeenRequest] = []
        self.address = self.apart = ""
        self._lock = threading.Lock()

    def commit(self, name: str, files: Mapping[str, bytes] | Path) -> str:
        """Make these the files of `datasets/OWNER/NAME` or `models/OWNER/NAME`, and return the id of the commit."""
        if isinstance(files, Path):
            files = bytes_of(files)
        commits = self.repositories.setdefault(name, {})
        id = _blob(repr((len(commits), sorted((path, _blob(content)) for path, content in files.items()))).encode())
        commits[id] = dict(files)
        return id

    def files(self, name: str, revision: str) -> tuple[str, dict[str, bytes]]:
        """The commit that a revision is, and its files. `main` is the newest."""
        commits = self.repositories[name]
        commit = [*commits][-1] if revision == "main" else revision
        return commit, commits[commit]

    def answer(self, request: Request, apart: bool) -> Response:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ") or None
        self.requests.append(SeenRequest(request.path, token, request.headers.get("Range"), apart))
        with self._lock:
            fault = next((one for one in self.faults if one.times > 0 and re.search(one.path, request.path)), None)
            if fault is not None:
                fault.times -= 1
        if fault is not None:
            time.sleep(fault.silence)
            if fault.status:
                return Response("it does not work", fault.status, fault.headers)
        if apart:
            response = _content(request, self.stored(request.path.strip("/")), {})
        elif found := _API.fullmatch(request.path):
            response = self._api(request, *found.groups())
        elif found := _FILE.fullmatch(request.path):
            response = self._file(request, *found.groups())
        else:
            response = _json({})
        if fault is not None and fault.cut is not None:
            response.response = [b"".join(response.response)[: fault.cut]]  # of another length than its header says
        return response

    def stored(self, digest: str) -> bytes:
        """A large file of any repository, by its SHA-256."""
        commits = (files for repository in self.repositories.values() for files in repository.values())
        contents = (content for files in commits for content in files.values())
        return next(content for content in contents if hashlib.sha256(content).hexdigest() == digest)

    def _api(self, request: Request, kind: str, id: str, verb: str | None, rest: str | None) -> Response:
        revision, _, folder = (rest or "/main").lstrip("/").partition("/")
        commit, files = self.files(f"{kind}/{id}", revision)
        entries = _entries(files)
        if verb == "paths-info":
            return _json([entries[path] for path in request.form.getlist("paths") if path in entries])
        if verb == "tree":
            start, deep = f"{folder}/" if folder else "", request.args.get("recursive", "").lower() == "true"
            below = {path.removeprefix(start): entry for path, entry in entries.items() if path.startswith(start)}
            return _json([entry for path, entry in below.items() if deep or "/" not in path])
        facts = {"id": id, "sha": commit, "private": False, "gated": False, "disabled": False, "tags": []}
        return _json(facts | {"siblings": [{"rfilename": path} for path in sorted(files)], "downloads": 0})

    def _file(self, request: Request, kind: str | None, id: str, revision: str, path: str) -> Response:
        commit, files = self.files(f"{kind or 'models'}/{id}", revision)
        if path not in files:
            return Response(status=404, headers={"X-Error-Code": "EntryNotFound"})
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_blob(files[path])}"'}
        if not path.endswith(_STORED_APART):
            return _content(request, files[path], headers)
        digest = hashlib.sha256(files[path]).hexdigest()
        headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(files[path]))}
        return Response(status=302, headers=headers | {"Location": f"{self.apart}/{digest}"})


@contextlib.contextmanager
def serving() -> Iterator[Hub]:
    """An empty Hub, as long as it serves at `address`."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    hub = Hub()
    with contextlib.ExitStack() as stack:
        for name in ("address", "apart"):
            answer = Request.application(lambda request, apart=name == "apart": hub.answer(request, apart))
            server = make_server("127.0.0.1", 0, answer, threaded=True)
            stack.callback(server.server_close)
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            stack.callback(server.shutdown)
            setattr(hub, name, f"http://127.0.0.1:{server.server_port}")
        yield hub


def _content(request: Request, content: bytes, headers: Mapping[str, str]) -> Response:
    """A file, or the part of it that was asked for."""
    response = Response(content, headers=headers)
    return response.make_conditional(request, accept_ranges=True, complete_length=len(content))


def _json(value: object) -> Response:
    return Response(json.dumps(value), mimetype="application/json")


def _entries(files: Mapping[str, bytes]) -> dict[str, dict]:
    """The files and folders of a commit by their paths, in the form of the Hub."""
    entries: dict[str, dict] = {}
    for path, content in sorted(files.items()):
        for folder in [*map(str, PurePosixPath(path).parents)][:-1]:
            entries[folder] = {"type": "directory", "oid": _blob(folder.encode()), "size": 0, "path": folder}
        entries[path] = {"type": "file", "oid": _blob(content), "size": len(content), "path": path}
        if path.endswith(_STORED_APART):
            digest = hashlib.sha256(content).hexdigest()
            entries[path]["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 130}
    return entries


def _blob(content: bytes) -> str:
    """The id that git gives a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
