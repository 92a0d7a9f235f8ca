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
from pathlib import Path, PurePosixPath
from urllib.parse import parse_qs, unquote, urlsplit

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
class Request:
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
        self.requests: list[Request] = []
        self.address = self.apart = ""
        self._lock = threading.Lock()

    def commit(self, name: str, files: Mapping[str, bytes] | Path) -> str:
        """Make these the files of `datasets/OWNER/NAME` or `models/OWNER/NAME`, and return the id of the commit."""
        if isinstance(files, Path):
            files = {str(file.relative_to(files)): file.read_bytes() for file in files.rglob("*") if file.is_file()}
        commits = self.repositories.setdefault(name, {})
        id = _blob(repr((len(commits), sorted((path, _blob(content)) for path, content in files.items()))).encode())
        commits[id] = dict(files)
        return id

    def files(self, name: str, revision: str) -> tuple[str, dict[str, bytes]]:
        """The commit that a revision is, and its files. `main` is the newest."""
        commits = self.repositories[name]
        commit = [*commits][-1] if revision == "main" else revision
        return commit, commits[commit]

    def fails(self, path: str) -> Fault | None:
        """The fault of a request, counted."""
        with self._lock:
            fault = next((one for one in self.faults if one.times > 0 and re.search(one.path, path)), None)
            if fault is not None:
                fault.times -= 1
            return fault

    def stored(self, digest: str) -> bytes:
        """A large file of any repository, by its SHA-256."""
        commits = [files for repository in self.repositories.values() for files in repository.values()]
        contents = (content for files in commits for content in files.values())
        return next(content for content in contents if hashlib.sha256(content).hexdigest() == digest)


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
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        token = self.headers.get("Authorization", "").removeprefix("Bearer ") or None
        asked = Request(unquote(self.path), token, self.headers.get("Range"), self.is_apart)
        self.hub.requests.append(asked)
        self._cut = None
        if (fault := self.hub.fails(asked.path)) is not None:
            time.sleep(fault.silence)
            if fault.status:
                return self._answer(fault.status, b"it does not work", fault.headers)
            self._cut = fault.cut
        path = unquote(urlsplit(self.path).path)
        if self.is_apart:
            self._content(self.hub.stored(path.strip("/")), {})
        elif found := _API.fullmatch(path):
            self._api(*found.groups(), body=body)
        elif found := _FILE.fullmatch(path):
            self._file(*found.groups())
        else:
            self._json({})

    do_HEAD = do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass

    def _api(self, kind: str, id: str, verb: str | None, rest: str | None, *, body: bytes) -> None:
        revision, _, folder = (rest or "/main").lstrip("/").partition("/")
        commit, files = self.hub.files(f"{kind}/{id}", revision)
        query, entries = parse_qs(urlsplit(self.path).query), _entries(files)
        if verb == "paths-info":
            self._json([entries[path] for path in parse_qs(body.decode())["paths"] if path in entries])
        elif verb == "tree":
            start, deep = f"{folder}/" if folder else "", query.get("recursive", ["false"])[0].lower() == "true"
            below = {path.removeprefix(start): entry for path, entry in entries.items() if path.startswith(start)}
            self._json([entry for path, entry in below.items() if deep or "/" not in path])
        else:
            facts = {"id": id, "sha": commit, "private": False, "gated": False, "disabled": False}
            siblings = [{"rfilename": path} for path in sorted(files)]
            self._json(facts | {"siblings": siblings, "tags": [], "downloads": 0})

    def _file(self, kind: str | None, id: str, revision: str, path: str) -> None:
        commit, files = self.hub.files(f"{kind or 'models'}/{id}", revision)
        if path not in files:
            return self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
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
        where = f"bytes {start}-{stop - 1}/{len(content)}"
        self._answer(206, content[start:stop], {**headers, "Content-Range": where})

    def _json(self, value: object) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

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
