"""Copies of a training at a URL, made while it runs, for machines whose disks vanish with them.

To `gs://` Orbax writes the steps itself, and only what is beside them is copied.
"""

import contextlib
import math
import os
import queue
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import fsspec

from affinage.checkpoint.store import CHECKPOINTS, COMMIT, METADATA, CheckpointStore, kept_steps
from affinage.errors import UserError, first_line
from affinage.network import errors_at, is_inside, is_local, upload
from affinage.results import MANIFEST, read_json_lines

_WHOLE_BYTES = 64_000_000  # a file up to this size is read before it is sent, so that one that grows arrives as it was
_NOT_BESIDE = frozenset({"profile", "request.json", MANIFEST, CHECKPOINTS})  # of this machine or start; the steps


class RemoteFolder:
    """Files below a URL, by their path from there, as fsspec reaches them. UserError says what cannot be reached."""

    def __init__(self, url: str) -> None:
        """Opens no connection. Raises UserError for a URL of an unknown kind, or whose package is missing."""
        self.url = url.rstrip("/")
        with errors_at(self.url):
            makes_folders = {"auto_mkdir": True} if is_local(self.url) else {}
            self._filesystem, root = fsspec.core.url_to_fs(self.url, use_listings_cache=False, **makes_folders)
        self._root = str(root).rstrip("/")

    def sizes(self) -> dict[str, int]:
        """All files below, with their length in bytes; none if there is no such folder."""
        with self._failing("list") as root:
            files = {path.removeprefix(root): facts for path, facts in self._filesystem.find(root, detail=True).items()}
        return {name: int(facts["size"] or 0) for name, facts in sorted(files.items()) if is_inside(name)}

    def read(self, name: str) -> bytes | None:
        """A small file; None if it is not there."""
        with self._failing("read", name) as path, contextlib.suppress(FileNotFoundError):
            return bytes(self._filesystem.cat_file(path))
        return None

    def write(self, name: str, contents: bytes) -> None:
        """Write a file of these bytes."""
        with self._failing("write", name) as path:
            upload(self._filesystem, path, contents)

    def put(self, file: Path, name: str) -> None:
        """Copy a file there. Raises FileNotFoundError if it is gone here."""
        if file.stat().st_size <= _WHOLE_BYTES:
            self.write(name, file.read_bytes())
        else:
            with self._failing("write", name) as path:
                self._filesystem.put_file(str(file), path)

    def get(self, name: str, file: Path) -> None:
        """Copy a file from there; its folder is made."""
        with self._failing("read", name) as path:
            self._filesystem.get([path], [str(file)])

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, the marks of what is complete first; those that are not there are no mistake."""
        for name in sorted(names, key=lambda name: not name.endswith((COMMIT, MANIFEST))):
            with self._failing("remove", name) as path, contextlib.suppress(FileNotFoundError):
                self._filesystem.rm_file(path)

    @contextlib.contextmanager
    def _failing(self, verb: str, name: str = "") -> Iterator[str]:
        try:
            yield f"{self._root}/{name}"
        except Exception as error:  # each library has its own
            what = f"cannot {verb} this: {type(error).__name__}: {first_line(error)}"
            fix = "Is there a network, and may you read and write there? `--set runtime.remote=null` makes no copy."
            raise UserError(what, where=f"{self.url}/{name}", fix=fix) from None


class Uploader:
    """Copies checkpoints, and what else a training writes into its folder, to a URL in a thread of its own.

    Steps that no rule keeps are removed there as they are here. While the place does not answer, the training
    continues, and the copy is tried again after the next save.
    """

    def __init__(self, url: str, folder: Path, *, keep_last: int = 2, keep_every: int | None = None) -> None:
        self.url, self.say = url, lambda line: print(line, flush=True)
        self._remote, self._folder, self._keep_last, self._keep_every = RemoteFolder(url), folder, keep_last, keep_every
        self._sent: dict[str, tuple[int, int]] = {}  # file beside the steps -> length and time of change, when copied
        self._copying: set[int] = set()
        self._requests: queue.Queue[None] = queue.Queue()
        self._failure = ""  # of the last attempt
        self._thread = threading.Thread(target=self._run, name="uploader", daemon=True)

    def start(self) -> None:
        """Copy what is here. Raises UserError if the place cannot be written to."""
        self._remote.write(".affinage", b"affinage")
        self._remote.remove([".affinage"])
        self.saved()

    def saved(self) -> set[int]:
        """Copy what is new, in the background; returns the steps that are being copied, which must stay."""
        if self._requests.empty():
            self._requests.put(None)
        if not self._thread.is_alive():
            self._thread.start()
        return self._copying

    def settle(self, seconds_left: Callable[[], float] = lambda: math.inf) -> str:
        """Wait until all is there, a copy has failed or `seconds_left()` is 0; returns "", or why not all is there."""
        self.saved()
        while self._requests.unfinished_tasks:
            if seconds_left() <= 0:
                return "there was no time for it"
            time.sleep(0.05)
        return self._failure

    def _run(self) -> None:
        while True:
            self._requests.get()
            try:
                self._copy()
                self._failure = ""
            except Exception as error:
                self._failure = first_line(error)
                self.say(f"cannot copy to {self.url}: {self._failure}. The next save tries again")
            self._copying = set()
            self._requests.task_done()

    def _copy(self) -> None:
        steps = self._folder / CHECKPOINTS
        self._copying = kept_steps(CheckpointStore(steps).steps(), 1, self._keep_every)
        # First what is beside the steps: whoever takes one of them from there finds the metrics up to it.
        for name in _files_in(self._folder, _NOT_BESIDE):
            with contextlib.suppress(FileNotFoundError):  # it has vanished
                facts = (self._folder / name).stat()
                if self._sent.get(name) != (facts.st_size, facts.st_mtime_ns):
                    self._remote.put(self._folder / name, name)
                    self._sent[name] = facts.st_size, facts.st_mtime_ns
        files_of, complete = _steps_in(self._remote.sizes())
        for step in sorted(self._copying, reverse=True):
            with contextlib.suppress(FileNotFoundError):  # a corrupted step, which is saved again
                # An earlier start may have copied it, or another state of this step.
                metadata, there = (steps / str(step) / METADATA).read_bytes(), f"{CHECKPOINTS}/{step}"
                if step not in complete or self._remote.read(f"{there}/{METADATA}") != metadata:
                    complete.discard(step)
                    self._remote.remove(files_of.pop(step, ()))
                    for name in _files_in(steps / str(step)):
                        self._remote.put(steps / str(step) / name, f"{there}/{name}")
                complete.add(step)
        if here := sorted(step for step in complete if step <= max(self._copying, default=-1)):
            for step in files_of.keys() - kept_steps(here, self._keep_last, self._keep_every):
                self._remote.remove(files_of[step])


def _files_in(folder: Path, without: Iterable[str] = ()) -> list[str]:
    """The paths of all files below a folder, relative to it, marks of completion last."""
    paths = [Path(top, name).relative_to(folder) for top, _, names in os.walk(folder) for name in names]
    names = (path.as_posix() for path in paths if path.parts[0] not in without)
    return sorted(names, key=lambda name: name.endswith(COMMIT))


def _steps_in(names: Iterable[str]) -> tuple[dict[int, list[str]], set[int]]:
    """{step: its files} of the checkpoints among the files of a training at a URL, and the complete steps."""
    steps: dict[int, list[str]] = {}
    for name in names:
        if match := re.match(rf"{CHECKPOINTS}/(\d+)/", name):
            steps.setdefault(int(match[1]), []).append(name)
    return steps, {step for step, files in steps.items() if f"{CHECKPOINTS}/{step}/{COMMIT}" in files}


def download(url: str, folder: Path, say: Callable[[str], None], *, newest: int | None = 2) -> list[int]:
    """Copy a training from a URL into a folder; returns the steps that were copied, newest first.

    Of the `newest` steps, or all for None, those come that are newer than what is here: two, in case the newest turns
    out to be corrupted. Of the files beside them those come that are not here, or are longer there and of a training
    that is further there. Raises UserError if the place cannot be reached.
    """
    remote, here = RemoteFolder(url), max(CheckpointStore(folder / CHECKPOINTS).steps(), default=-1)
    files_of, complete = _steps_in(sizes := remote.sizes())
    # A rollback shortens the metrics: what is there, longer, may be of steps that it has left out.
    logged = max((row.get("step", -1) for row in read_json_lines(folder / "metrics.jsonl")), default=-1)
    is_behind = logged < max(complete, default=-1)
    for name, size in sizes.items():  # what is beside the steps comes first: a kill may end this at any moment
        file = folder / name
        wanted = not file.exists() or (is_behind and size > file.stat().st_size)
        if wanted and name.partition("/")[0] not in _NOT_BESIDE:
            remote.get(name, file)
    copied = sorted((step for step in complete if step > here), reverse=True)[:newest]
    for step in copied:
        say(f"copying step {step:,} from {url}")
        shutil.rmtree(folder / CHECKPOINTS / str(step), ignore_errors=True)
        for name in sorted(files_of[step], key=lambda name: name.endswith(COMMIT)):  # the mark comes last
            remote.get(name, folder / name)
    return copied
