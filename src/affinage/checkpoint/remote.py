"""Copies of a training at a URL, made while it runs, for machines whose disks vanish with them.

To `gs://` Orbax writes the steps itself, and only what is beside them is copied.
"""

import contextlib
import os
import queue
import re
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import fsspec

from affinage.checkpoint.metadata import METADATA
from affinage.checkpoint.store import CHECKPOINTS, COMMIT, CheckpointStore, kept_steps
from affinage.data.token_shards import errors_at, is_local, upload
from affinage.errors import UserError, first_line
from affinage.results import MANIFEST, read_json_lines

_WHOLE_BYTES = 64_000_000  # a file up to this size is read before it is sent, so that one that grows arrives as it was
_COPIED_BACK = 2  # of the newest steps: the one before is there if the newest turns out to be corrupted
_PROBE = ".affinage"
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
        with self._failing("list", ""):
            files, prefix = self._filesystem.find(self._root, detail=True), f"{self._root}/"
            names = {path.removeprefix(prefix): int(facts["size"] or 0) for path, facts in sorted(files.items())}
            return {name: size for name, size in names.items() if is_inside(name)}

    def read(self, name: str) -> bytes | None:
        """A small file; None if it is not there."""
        with self._failing("read", name), contextlib.suppress(FileNotFoundError):
            return bytes(self._filesystem.cat_file(f"{self._root}/{name}"))
        return None

    def write(self, name: str, contents: bytes) -> None:
        """Write a file of these bytes."""
        with self._failing("write", name):
            upload(self._filesystem, f"{self._root}/{name}", contents)

    def put(self, file: Path, name: str) -> None:
        """Copy a file there. Raises FileNotFoundError if it is gone here."""
        if file.stat().st_size <= _WHOLE_BYTES:
            self.write(name, file.read_bytes())
        else:
            with self._failing("write", name):
                self._filesystem.put_file(str(file), f"{self._root}/{name}")

    def get(self, name: str, file: Path) -> None:
        """Copy a file from there; its folder is made."""
        file.parent.mkdir(parents=True, exist_ok=True)
        with self._failing("read", name):
            self._filesystem.get_file(f"{self._root}/{name}", str(file))

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, the marks of what is complete first; those that are not there are no mistake."""
        for name in sorted(names, key=lambda name: not name.endswith((COMMIT, MANIFEST))):
            with self._failing("remove", name), contextlib.suppress(FileNotFoundError):
                self._filesystem.rm_file(f"{self._root}/{name}")

    @contextlib.contextmanager
    def _failing(self, verb: str, name: str) -> Iterator[None]:
        try:
            yield
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
        self._remote, self._folder = RemoteFolder(url), folder
        self._keep_last, self._keep_every = keep_last, keep_every
        self._sent: dict[str, Any] = {}  # file -> its length and time of change, step -> its metadata, when copied
        self._copying: set[int] = set()
        self._requests: queue.Queue[None] = queue.Queue()
        self._failure = ""  # of the last attempt
        self._thread = threading.Thread(target=self._run, name="uploader", daemon=True)

    def start(self) -> None:
        """Copy what is here. Raises UserError if the place cannot be written to."""
        self._remote.write(_PROBE, b"affinage")
        self._remote.remove([_PROBE])
        self.saved()

    def saved(self) -> set[int]:
        """Copy what is new, in the background; returns the steps that are being copied, which must stay."""
        if self._requests.empty():
            self._requests.put(None)
        if not self._thread.is_alive():
            self._thread.start()
        return self._copying

    def settle(self, seconds_left: Callable[[], float | None] = lambda: None) -> str:
        """Wait until everything is there, or an attempt has failed; returns "", or why not everything is there.

        `seconds_left` is called several times a second and returns how long to wait; None: as long as it takes.
        """
        self.saved()
        while self._requests.unfinished_tasks:
            left = seconds_left()
            if left is not None and left <= 0:
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
        for name in _files_in(self._folder):
            if name.partition("/")[0] not in _NOT_BESIDE:
                with contextlib.suppress(FileNotFoundError):  # it has vanished
                    facts = (self._folder / name).stat()
                    if self._sent.get(name) != (facts.st_size, facts.st_mtime_ns):
                        self._remote.put(self._folder / name, name)
                        self._sent[name] = facts.st_size, facts.st_mtime_ns
        for step in sorted(self._copying, reverse=True):
            there = f"{CHECKPOINTS}/{step}"
            with contextlib.suppress(FileNotFoundError):  # a corrupted step, which is saved again
                metadata = (steps / str(step) / METADATA).read_bytes()
                if self._sent.get(there) == metadata:
                    continue
                # An earlier start may have copied it, or another state of this step.
                if self._remote.read(f"{there}/{METADATA}") != metadata or not self._remote.read(f"{there}/{COMMIT}"):
                    self._remote.remove([f"{there}/{COMMIT}"])
                    for name in _files_in(steps / str(step)):
                        self._remote.put(steps / str(step) / name, f"{there}/{name}")
                self._sent[there] = metadata
        if self._copying:
            files_of, complete = _steps_in(self._remote.sizes())
            complete = [step for step in complete if step <= max(self._copying)]
            for step in files_of.keys() - kept_steps(complete, self._keep_last, self._keep_every):
                self._remote.remove(files_of[step])
                self._sent.pop(f"{CHECKPOINTS}/{step}", None)


def _files_in(folder: Path) -> list[str]:
    """The paths of all files below a folder, relative to it, marks of completion last."""
    paths = [Path(top, name).relative_to(folder) for top, _, names in os.walk(folder) for name in names]
    return sorted((path.as_posix() for path in paths), key=lambda name: name.endswith(COMMIT))


def _steps_in(names: Iterable[str]) -> tuple[dict[int, list[str]], list[int]]:
    """{step: its files} of the checkpoints among the files of a training at a URL, and the complete steps in order."""
    steps: dict[int, list[str]] = {}
    for name in names:
        if match := re.match(rf"{CHECKPOINTS}/(\d+)/", name):
            steps.setdefault(int(match[1]), []).append(name)
    return steps, [step for step in sorted(steps) if f"{CHECKPOINTS}/{step}/{COMMIT}" in steps[step]]


def download_newest(url: str, folder: Path, say: Callable[[str], None], *, steps: bool = True) -> list[int]:
    """Copy a training from a URL into a folder: its two newest `steps`, as far as they are newer than those here, and
    of the files beside them those that are not here, or are longer there and of a training that is further there.

    Returns the steps that were copied, newest first. Raises UserError if the place cannot be reached.
    """
    remote, here = RemoteFolder(url), max(CheckpointStore(folder / CHECKPOINTS).steps(), default=-1)
    sizes = remote.sizes()
    files_of, complete = _steps_in(sizes)
    # A rollback shortens the metrics: what is there, longer, may be of steps that it has left out.
    logged = max((row.get("step", -1) for row in read_json_lines(folder / "metrics.jsonl")), default=-1)
    is_behind = logged < max(complete, default=-1)
    for name, size in sizes.items():  # what is beside the steps comes first: a kill may end this at any moment
        file = folder / name
        wanted = not file.exists() or (is_behind and size > file.stat().st_size)
        if wanted and name.partition("/")[0] not in _NOT_BESIDE:
            remote.get(name, file)
    copied = [step for step in reversed(complete) if step > here][:_COPIED_BACK] if steps else []
    for step in copied:
        say(f"copying step {step:,} from {url}")
        shutil.rmtree(folder / CHECKPOINTS / str(step), ignore_errors=True)
        for name in sorted(files_of[step], key=lambda name: name.endswith(COMMIT)):  # the mark comes last
            remote.get(name, folder / name)
    return copied


def download(url: str, folder: Path, names: Collection[str]) -> None:
    """Copy the files and folders of these names of a training at a URL."""
    remote = RemoteFolder(url)
    for name in remote.sizes():
        if name.partition("/")[0] in names:
            remote.get(name, folder / name)


def is_inside(name: object) -> bool:
    """Whether a name that somebody else wrote is of a file below a folder, and leads nowhere else."""
    if not isinstance(name, str) or "\\" in name or "\0" in name:
        return False
    return not {"", ".", ".."} & {*name.split("/")}
