"""Copies of a training at a URL, made while it runs: for machines whose disks vanish with them.

A step there has the files that Orbax wrote, and last `copy.json` with their hashes: without it a step is incomplete.
"""

import contextlib
import hashlib
import json
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from affinage.checkpoint.metadata import COMMIT, METADATA
from affinage.checkpoint.remote import RemoteError, RemoteFolder, is_inside, reached
from affinage.checkpoint.store import complete_steps, kept_steps
from affinage.errors import UserError

CHECKPOINTS = "checkpoints"  # in the folder of a training
COPY = "copy.json"  # in the folder of a step at a URL
_RETRY_AT_MOST = 300.0  # seconds between two attempts
_WITHOUT = "`--set runtime.remote=null` does without the copy."
_STUCK = 600.0  # seconds without a file that arrived, after which a copy is no longer waited for
_AT_ONCE = 4  # files
# Beside the checkpoints, which have rules of their own: what belongs to this machine, or to this start.
_NOT_COPIED = frozenset({CHECKPOINTS, "profile", "alive", "request.json", "manifest.json"})


class Uploader:
    """Copies checkpoints, and what else a training writes, to a URL in a thread of its own.

    The newest step goes first; steps that no rule keeps are removed there as they are here. If the place does not
    answer, the training continues, and the copy is tried again.

    Use it as a context manager around the training, after `download_newest`.

    Args:
        url: of the training.
        folder: of the training.
        keep_last: how many of the newest steps stay there.
        keep_every: steps at multiples of this stay forever; None for none.
        retry: seconds after a copy that failed until the next attempt; doubled each time.
    """

    def __init__(
        self, url: str, folder: Path, *, keep_last: int = 2, keep_every: int | None = None, retry: float = 5.0
    ) -> None:
        self.url, self.say = url, lambda line: print(line, flush=True)
        self.in_use: frozenset[int] = frozenset()  # steps that must not be removed here while they are copied
        self.newest: int | None = None  # step that is there
        self._folder, self._retry = folder, retry
        self._keep_last, self._keep_every = keep_last, keep_every
        self._remote = RemoteFolder(url)
        self._sent: dict[str, Any] = {}  # what is there: length and time of change of files, digests of steps
        self._changed = threading.Condition()
        self._requested = self._handled = self._files = 0
        self._failure, self._hurry, self._closed = "", False, False

    def __enter__(self) -> "Uploader":
        with reached("runtime.remote", _WITHOUT):
            self._remote.check()
        threading.Thread(target=self._run, name="uploader", daemon=True).start()
        self.saved()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def saved(self) -> None:
        """There may be something new to copy; returns at once."""
        with self._changed:
            self._requested += 1
            self._changed.notify_all()

    def settle(self, seconds_left: Callable[[], float | None] = lambda: None) -> str:
        """Wait until everything is there.

        Args:
            seconds_left: called again and again, how long to wait; None: as long as files arrive.

        Returns:
            "" if everything is there, otherwise why not.
        """
        with self._changed:
            self._hurry = True
            self._requested += 1
            requested, files, since = self._requested, self._files, time.monotonic()
            self._changed.notify_all()
            while self._handled < requested:
                if self._files != files:
                    files, since = self._files, time.monotonic()
                left = seconds_left()
                if left is not None and left <= 0:
                    return "there was no time for it"
                if time.monotonic() - since > _STUCK:
                    return f"no file has arrived there for {_STUCK:.0f} s"
                self._changed.wait(0.2 if left is None else min(left, 0.2))
            self._hurry = False
            return self._failure

    def _run(self) -> None:
        retry = self._retry
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._requested > self._handled)
                if self._closed:
                    return
                requested = self._requested
            try:
                self._copy()
                failure, retry = "", self._retry
            except (RemoteError, OSError) as error:
                failure = str(error)
            if failure and not self._failure:
                self.say(f"cannot copy to {self.url} now: {failure}. The training continues, and it is tried again")
            elif self._failure and not failure:
                self.say(f"copies to {self.url} again")
            with self._changed:
                self._failure, self._handled = failure, requested
                self._changed.notify_all()
                if failure:
                    self._changed.wait_for(lambda: self._closed or self._hurry, retry)
                    retry, self._requested = min(2 * retry, _RETRY_AT_MOST), self._requested + 1

    def _copy(self) -> None:
        self._copy_others()
        steps = complete_steps(self._folder / CHECKPOINTS)
        wanted = {*steps[-1:], *(step for step in steps if self._keep_every and step % self._keep_every == 0)}
        for step in sorted(wanted, reverse=True):
            self.in_use = frozenset({step})
            try:
                self._copy_step(step)
            except FileNotFoundError:
                if step in complete_steps(self._folder / CHECKPOINTS)[-1:]:
                    raise
            finally:
                self.in_use = frozenset()

    def _copy_step(self, step: int) -> None:
        folder, there = self._folder / CHECKPOINTS / str(step), self._remote / f"{CHECKPOINTS}/{step}"
        mark = (folder / COMMIT).stat().st_mtime_ns  # another one if the step was saved again
        if self._sent.get(f"step {step}") == mark:
            return
        hashes = {path.relative_to(folder).as_posix(): _sha256(path) for path in folder.rglob("*") if path.is_file()}
        content = json.dumps(hashes).encode()
        if there.read(COPY) != content:  # which an earlier start may have copied

            def send(name: str) -> None:
                newest = max(complete_steps(folder.parent), default=step)
                if not (self._hurry and newest > step):  # otherwise there is no time for this one
                    there.put(folder / name, name)
                    with self._changed:
                        self._files += 1
                        self._changed.notify_all()

            there.remove([COPY])
            there.remove([name for name in there.sizes() if name not in hashes])
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                list(pool.map(send, hashes))
            arrived = there.sizes()
            for name in hashes:
                if arrived.get(name) != (length := (folder / name).stat().st_size):
                    raise RemoteError(f"{arrived.get(name, 0):,} of {length:,} bytes of {there.url}/{name} arrived")
            there.write(COPY, content)
        self._sent[f"step {step}"] = mark
        self.newest = max(step, self.newest or 0)
        self._remove_old(step)

    def _remove_old(self, newest: int) -> None:
        there = RemoteSteps(self._remote / CHECKPOINTS)
        found = {step: files for step, files in there.listing().items() if step <= newest}
        complete = [step for step, files in found.items() if COPY in files]
        for step in found.keys() - kept_steps(complete, self._keep_last, self._keep_every):
            there.remove(step)

    def _copy_others(self) -> None:
        found = {}
        for path in sorted(self._folder.rglob("*")):
            name = path.relative_to(self._folder).as_posix()
            hidden = any(part.startswith(".") for part in name.split("/"))
            if name.partition("/")[0] not in _NOT_COPIED and not hidden and path.is_file() and not path.is_symlink():
                found[name] = (path.stat().st_size, path.stat().st_mtime_ns)
        # Marks of complete checkpoints, such as of frozen weights, come last.
        for name in sorted(found, key=lambda name: (name.endswith(COMMIT), name)):
            if self._sent.get(name) != found[name]:
                self._remote.put(self._folder / name, name)
                self._sent[name] = found[name]
        gone = [name for name in self._sent if name not in found and not name.startswith("step ")]
        self._remote.remove(gone)
        for name in gone:
            del self._sent[name]


class RemoteSteps:
    """The checkpoints of a training at a URL."""

    def __init__(self, folder: RemoteFolder) -> None:
        self.folder = folder

    def listing(self) -> dict[int, dict[str, int]]:
        """{step: {file: bytes}} of everything that is named like a step, oldest first."""
        found: dict[int, dict[str, int]] = {}
        for name, size in self.folder.sizes().items():
            step, _, file = name.partition("/")
            if step.isdecimal() and file:
                found.setdefault(int(step), {})[file] = size
        return dict(sorted(found.items()))

    def described(self) -> list[dict[str, Any]]:
        """{step, saved, bytes, why_not} of the steps, oldest first; see `affinage.checkpoint.browse.listing`."""
        found = []
        for step, files in self.listing().items():
            saved, why_not = None, "" if COPY in files else "it is incomplete: its copy was cut off"
            with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                metadata = json.loads(self.folder.read(f"{step}/{METADATA}") or b"")
                saved = metadata["custom_metadata"]["affinage"]["facts"]["saved"]
            found.append({"step": step, "saved": saved, "bytes": sum(files.values()), "why_not": why_not})
        return found

    def download(self, step: int, folder: Path) -> str:
        """Copy a step into a folder of steps, complete or not at all.

        Returns:
            "" if it is there, otherwise what is wrong with the copy at the URL.
        """
        try:
            hashes = dict(json.loads(self.folder.read(f"{step}/{COPY}") or b""))
        except (ValueError, TypeError, RecursionError):
            return "it is incomplete"
        if not all(is_inside(name) for name in hashes):
            return "the name of a file leads out of its folder"
        part = folder / f".{step}.part"
        for name, digest in hashes.items():
            if not has_hash(part / name, digest):  # what is there was copied before
                try:
                    self.folder.get(f"{step}/{name}", part / name)
                except RemoteError as error:
                    if f"{step}/{name}" in self.folder.sizes():
                        raise
                    return str(error)
            if not has_hash(part / name, digest):
                shutil.rmtree(part)
                return f"{name} is not what was written"
        shutil.rmtree(folder / str(step), ignore_errors=True)
        part.rename(folder / str(step))
        return ""

    def remove(self, step: int) -> None:
        """Remove a step, its mark first, so that half a step never looks complete."""
        self.folder.remove([f"{step}/{COPY}", *(f"{step}/{name}" for name in (self.folder / str(step)).sizes())])


def find_steps(url: str) -> RemoteSteps:
    """The checkpoints at a URL: of a training, or of a folder with one training in it.

    Raises:
        UserError: there are none, or several trainings.
    """
    folder = RemoteFolder(url)
    with reached(url):
        files = folder.sizes()
    if any(name.startswith(f"{CHECKPOINTS}/") for name in files):
        return RemoteSteps(folder / CHECKPOINTS)
    if any(name.partition("/")[0].isdecimal() for name in files):
        return RemoteSteps(folder)
    trainings = sorted({name.partition("/")[0] for name in files if name.split("/")[1:2] == [CHECKPOINTS]})
    if len(trainings) == 1:
        return RemoteSteps(folder / trainings[0] / CHECKPOINTS)
    if trainings:
        listed = "".join(f"\n    {folder.url}/{name}" for name in trainings)
        raise UserError("there are several trainings", where=url, fix=f"Name one of them:{listed}")
    raise UserError("there is no checkpoint", where=url, fix="Name what a recipe's `runtime.remote` says.")


def download_newest(url: str, folder: Path, say: Callable[[str], None]) -> int | None:
    """Copy a training from a URL into a folder, if there is a newer checkpoint there than here.

    Args:
        url: that an `Uploader` of the training has written to.
        folder: of the training.
        say: prints a line.

    Returns:
        The step that was copied; None if what is here is as new, or there is nothing there.

    Raises:
        UserError: the place cannot be reached.
    """
    remote = RemoteFolder(url)
    steps, own = RemoteSteps(remote / CHECKPOINTS), folder / CHECKPOINTS
    with reached("runtime.remote", _WITHOUT):
        there = steps.listing()
    here = max(complete_steps(own), default=-1)
    own.mkdir(parents=True, exist_ok=True)
    for step in sorted(there, reverse=True):
        if step <= here:
            return None
        say(f"copying step {step:,} from {url}")
        with reached("runtime.remote", _WITHOUT):
            if not (corruption := steps.download(step, own)):
                for name in remote.sizes():
                    if name.partition("/")[0] not in _NOT_COPIED and is_inside(name):
                        remote.get(name, folder / name)
                return step
        say(f"step {step:,} at {url} is corrupted: {corruption}; the one before is taken")
    return None


def forget(url: str) -> None:
    """Remove the checkpoints at a URL: the training starts from the beginning. Raises UserError."""
    remote = RemoteFolder(url)
    steps = RemoteSteps(remote / CHECKPOINTS)
    with reached("runtime.remote", _WITHOUT):
        remote.remove(["manifest.json"])
        for step in steps.listing():
            steps.remove(step)


def has_hash(path: Path, digest: str) -> bool:
    """Whether there is a file with this SHA-256."""
    return path.is_file() and not path.is_symlink() and _sha256(path) == digest


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
