"""Results of stages at a URL, in folders called as in the store: an empty machine takes them from there.

A result is there once its manifest is, which comes last, and is taken only if every file has the hash that it says.
"""

import contextlib
import json
import queue
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from affinage.checkpoint.remote import RemoteError, RemoteFolder, is_inside, reached
from affinage.checkpoint.uploader import CHECKPOINTS, has_hash
from affinage.errors import UserError
from affinage.pipeline.store import MANIFEST, Request, Store, read_manifest

# What only the next stage reads whole; of these others want to know what they were made from, and how much there was.
_LARGE = frozenset({"ingest", "filter", "dedup", "decontaminate", "tokenize"})
_SMALL_FILE = 1_000_000  # bytes
_STUCK = 600.0  # seconds without a file that came to its end, after which a copy is no longer waited for
_FIX = "`--set runtime.remote=null` does without the copy."


class RemoteResults:
    """What is at the recipe's `remote`, and a thread that copies there what is new here."""

    def __init__(self, url: str, store: Store) -> None:
        self._remote, self._store = RemoteFolder(url), store
        self._there: dict[str, dict[str, Any] | None] = {}
        self._waiting: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._asked = self._done = 0  # copies
        self._files = 0  # that came to their end
        self._failure = ""
        self._thread: threading.Thread | None = None

    def has(self, request: Request) -> bool:
        """Whether a result is there. Raises UserError if nobody answers."""
        return self._manifest(request) is not None

    def bring(
        self,
        stages: Collection[str],
        requests: Mapping[str, Request],
        say: Callable[[str], None],
        taken: Callable[[Request], contextlib.AbstractContextManager[bool]],
        *,
        looked_at: bool = False,
    ) -> None:
        """Copy stages' results here, and what they were made from, as far as they are there and not here.

        Args:
            stages: whose results are read.
            requests: of all stages, by name.
            say: told what is copied.
            taken: inside, a result is nobody else's to write; it tells whether it is still missing.
            looked_at: they are only looked at, which does not need the whole of large ones.
        """
        left, brought = [(name, not looked_at or name not in _LARGE) for name in stages], set()
        while left:
            name, whole = left.pop(0)
            if name in brought:
                continue
            brought.add(name)
            request = requests[name]
            if not self._store.is_complete(request) and (whole or read_manifest(self._store.path(request)) is None):
                with taken(request) as missing, reached("runtime.remote", _FIX):
                    if missing:
                        self._fetch(request, say, whole=whole)
            left += [(other, other not in _LARGE) for other in request.inputs]

    def _fetch(self, request: Request, say: Callable[[str], None], *, whole: bool) -> None:
        name, manifest = self._store.path(request).name, self._manifest(request)
        if manifest is None:
            return
        files = {file: facts for file, facts in manifest["files"].items() if whole or facts["bytes"] <= _SMALL_FILE}
        if whole:
            say(f"copying {name} from {self._remote.url}: {sum(f['bytes'] for f in files.values()) / 1e6:,.1f} MB")
        part = self._store.folder / f".{name}.part"
        for file, facts in files.items():
            if not has_hash(part / file, facts["sha256"]):
                self._remote.get(f"{name}/{file}", part / file)
            if not has_hash(part / file, facts["sha256"]):
                shutil.rmtree(part)
                raise UserError(
                    f"{file} is not what was copied there",
                    where=f"{self._remote.url}/{name}",
                    fix=f"Remove its {MANIFEST}, and it is made again.",
                )
        part.mkdir(parents=True, exist_ok=True)
        (part / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        self._store.discard(request)
        part.rename(self._store.path(request))

    def _manifest(self, request: Request) -> dict[str, Any] | None:
        """What the manifest of a result says that is there; None if there is none, or it is of something else."""
        name = self._store.path(request).name
        if name not in self._there:
            with reached("runtime.remote", _FIX):
                text = self._remote.read(f"{name}/{MANIFEST}")
            try:
                found = json.loads(text or b"{}")
                files = found["files"].items()
                sound = found["key"] == request.key and all(is_inside(file) for file, _ in files)
                sound = sound and all(isinstance(facts["bytes"], int) and facts["sha256"] for _, facts in files)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                sound = False
            self._there[name] = found if sound else None
        return self._there[name]

    def copy(self, request: Request) -> None:
        """Copy a complete result there, in the background; returns at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="results", daemon=True)
            self._thread.start()
        self._asked += 1
        self._waiting.put(request)

    def wait(self) -> str:
        """Until all are there, as long as files come to their end; "" if they are, else why not."""
        files, since = self._files, time.monotonic()
        while self._done < self._asked and time.monotonic() - since < _STUCK:
            time.sleep(0.05)
            if self._files != files:
                files, since = self._files, time.monotonic()
        stuck = f"no file has arrived there for {_STUCK:.0f} s" if self._done < self._asked else ""
        return self._failure or stuck

    def _work(self) -> None:
        while True:
            request = self._waiting.get()
            try:
                self._copy(request)
            except (RemoteError, OSError) as error:
                self._failure = str(error)
            self._done += 1

    def _copy(self, request: Request) -> None:
        folder = self._store.path(request)
        manifest = read_manifest(folder)
        if manifest is None:
            return
        there = self._remote / folder.name
        there.remove([MANIFEST])
        sizes = there.sizes()
        for name, facts in manifest["files"].items():
            # A training has copied its checkpoints itself.
            if not (name.startswith(f"{CHECKPOINTS}/") and sizes.get(name) == facts["bytes"]):
                there.put(folder / name, name)
            self._files += 1
        # Checkpoints that were kept, and are not on this machine, stay.
        others = [name for name in sizes if not name.startswith(f"{CHECKPOINTS}/")]
        there.remove([name for name in others if name not in manifest["files"]])
        there.write(MANIFEST, (folder / MANIFEST).read_bytes())
        self._there[folder.name] = manifest
