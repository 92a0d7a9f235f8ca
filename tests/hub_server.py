"""A server of the Hugging Face Hub's protocol in this process, on the loopback address.

Large files are answered, as there, with the way to another host, which is asked without a token.
"""

import contextlib
import hashlib
import json
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

_STORED_APART = (".parquet", ".safetensors", ".gz")
_VERBS = "revision|tree|paths-info|auth-check"
_API = re.compile(rf"/api/(models|datasets)/([^/]+/[^/]+?)(?:/({_VERBS})(.*))?")
_FILE = re.compile(r"(?:/(datasets))?/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Repository:
    """What was committed: by the id of each commit all its files, and the commit that each branch is at."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    private: bool = False
    readers: set[str] = field(default_factory=set)  # the tokens that may read it, where it is gated or private

    def files(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """The commit of a branch, or of the beginning of its id, and its files."""
        commit = self.branches.get(revision, revision)
        return (commit, self.commits[commit]) if commit in self.commits else None


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
class Request:
    """What was asked, and of whom: the Hub, or the host of its large files."""

    path: str
    token: str | None
    range: str | None
    apart: bool


class Hub:
    """Repositories, the faults to come, and what was asked."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.tokens: set[str] = set()  # of its users
        self.address = self.apart = ""
        self._lock = threading.Lock()

    def commit(self, name: str, files: Mapping[str, bytes] | Path, branch: str = "main") -> str:
        """Make these the files of `datasets/OWNER/NAME` or `models/OWNER/NAME`, and return the id of the commit."""
        if isinstance(files, Path):
            files = {str(file.relative_to(files)): file.read_bytes() for file in files.rglob("*") if file.is_file()}
        repository = self.repositories.setdefault(name, Repository())
        told = repr((len(repository.commits), sorted((path, _blob(content)) for path, content in files.items())))
        id = _blob(told.encode())
        repository.commits[id] = dict(files)
        repository.branches[branch] = id
        return id

    def fails(self, path: str) -> Fault | None:
        """The fault of a request, counted."""
        with self._lock:
            fault = next((one for one in self.faults if one.times > 0 and re.search(one.path, path)), None)
            if fault is not None:
                fault.times -= 1
            return fault

    def stored(self, digest: str) -> bytes | None:
        """A large file of any repository, by its SHA-256."""
        commits = [files for repository in self.repositories.values() for files in repository.commits.values()]
        contents = (content for files in commits for content in files.values())
        return next((content for content in contents if hashlib.sha256(content).hexdigest() == digest), None)


@contextlib.contextmanager
def serving() -> Iterator[Hub]:
    """An empty Hub, as long as it serves at `address`."""
    hub = Hub()
    with contextlib.ExitStack() as stack:
        for apart in (False, True):
            handler = type("Handler", (_Handler,), {"hub": hub, "is_apart": apart})
            server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
            server.daemon_threads = True
            stack.callback(server.server_close)
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
            stack.callback(server.shutdown)
            setattr(hub, "apart" if apart else "address", f"http://127.0.0.1:{server.server_port}")
        yield hub


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub
    is_apart: bool

    def do_GET(self) -> None:
        self._handle()

    do_HEAD = do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        authorization = self.headers.get("Authorization")
        self._token = authorization.removeprefix("Bearer ") if authorization else None
        asked = Request(unquote(self.path), self._token, self.headers.get("Range"), self.is_apart)
        self.hub.requests.append(asked)
        self._cut = None
        if (fault := self.hub.fails(asked.path)) is not None:
            time.sleep(fault.silence)
            if fault.status:
                return self._answer(fault.status, b"it does not work", fault.headers)
            self._cut = fault.cut
        path = unquote(urlsplit(self.path).path)
        if self._token is not None and not self.is_apart and self._token not in self.hub.tokens:
            return self._error(401, "", "Invalid credentials in Authorization header")
        if self.is_apart:
            content = self.hub.stored(path.strip("/"))
            return self._error(404, "EntryNotFound") if content is None else self._content(content, {})
        if found := _API.fullmatch(path):
            return self._api(*found.groups(), body=body)
        if found := _FILE.fullmatch(path):
            return self._file(*found.groups())
        self._json({})

    def _repository(self, name: str, *, of_files: bool) -> Repository | None:
        """A repository that may be read; else None, and the refusal has been answered."""
        repository = self.hub.repositories.get(name)
        may = repository is not None and self._token in repository.readers
        if repository is None or (repository.private and not may):
            self._error(401 if self._token is None else 404, "RepoNotFound", "Repository not found")
        elif repository.gated and of_files and not may:
            told = f"Access to {name} is restricted."
            self._error(401 if self._token is None else 403, "GatedRepo", told)
        else:
            return repository
        return None

    def _api(self, kind: str, id: str, verb: str | None, rest: str | None, *, body: bytes) -> None:
        repository = self._repository(f"{kind}/{id}", of_files=verb == "auth-check")
        if repository is None:
            return
        if verb == "auth-check":
            return self._json({})
        revision, _, folder = (rest or "/main").lstrip("/").partition("/")
        found = repository.files(revision)
        if found is None:
            return self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        commit, files = found
        if verb in (None, "revision"):
            siblings = [{"rfilename": path} for path in sorted(files)]
            facts = {"id": id, "sha": commit, "siblings": siblings, "private": repository.private, "disabled": False}
            return self._json(facts | {"gated": "auto" if repository.gated else False, "tags": [], "downloads": 0})
        if verb == "paths-info":
            asked = parse_qs(body.decode())["paths"]
            return self._json([entry for path in asked if (entry := _entry(files, path))])
        deep = parse_qs(urlsplit(self.path).query).get("recursive", ["false"])[0].lower() == "true"
        entries = _tree(files, folder, deep=deep)
        if folder and not entries:
            return self._error(404, "EntryNotFound", f"{folder} does not exist")
        self._json(entries)

    def _file(self, kind: str | None, id: str, revision: str, path: str) -> None:
        repository = self._repository(f"{kind or 'models'}/{id}", of_files=True)
        if repository is None:
            return
        commit, files = repository.files(revision) or (None, {})
        if path not in files:
            return self._error(404, "EntryNotFound" if commit else "RevisionNotFound")
        content = files[path]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_blob(content)}"', "Accept-Ranges": "bytes"}
        if not path.endswith(_STORED_APART):
            return self._content(content, headers)
        digest = hashlib.sha256(content).hexdigest()
        headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content))}
        self._answer(302, b"", headers | {"Location": f"{self.hub.apart}/{digest}"})

    def _content(self, content: bytes, headers: Mapping[str, str]) -> None:
        """A file, or the part of it that was asked for."""
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if not asked or self.headers.get("If-Range") not in (None, headers.get("ETag")):
            return self._answer(200, content, headers)
        start, stop = int(asked[1]), min(int(asked[2] or len(content)), len(content) - 1) + 1
        if start >= len(content):
            return self._answer(416, b"", {**headers, "Content-Range": f"bytes */{len(content)}"})
        where = f"bytes {start}-{stop - 1}/{len(content)}"
        self._answer(206, content[start:stop], {**headers, "Content-Range": where})

    def _json(self, value: object) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _error(self, status: int, code: str, told: str = "") -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": told, "Content-Type": "application/json"}
        self._answer(status, json.dumps({"error": told}).encode(), headers)

    def _answer(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: self._cut])
        if self._cut is not None:
            self.wfile.flush()
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)


def _tree(files: Mapping[str, bytes], folder: str, *, deep: bool) -> list[dict]:
    """What is in a folder of a commit, in the form of the Hub."""
    start = f"{folder}/" if folder else ""
    inside = [path for path in sorted(files) if path.startswith(start)]
    above = {path[: end.start()] for path in inside for end in re.finditer("/", path) if end.start() >= len(start)}
    entries = [_entry(files, path) for path in [*sorted(above), *inside]]
    return [entry for entry in entries if entry and (deep or "/" not in entry["path"].removeprefix(start))]


def _entry(files: Mapping[str, bytes], path: str) -> dict | None:
    if path not in files:
        inside = any(one.startswith(f"{path}/") for one in files)
        return {"type": "directory", "oid": _blob(path.encode()), "size": 0, "path": path} if inside else None
    content = files[path]
    entry: dict = {"type": "file", "oid": _blob(content), "size": len(content), "path": path}
    if path.endswith(_STORED_APART):
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return entry


def _blob(content: bytes) -> str:
    """The id that git gives a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
