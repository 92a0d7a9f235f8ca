"""Copies of a training at a URL, made while it runs: for machines whose disks vanish with them.

A step there has the files that Orbax wrote. Its mark of completion is copied last, and its metadata, which hold the
checksums of all arrays, identify it.
"""

import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from affinage.checkpoint.metadata import COMMIT, METADATA
from affinage.checkpoint.remote import RemoteError, RemoteFolder, is_inside, reached
from affinage.checkpoint.store import complete_steps, kept_steps

CHECKPOINTS = "checkpoints"  # in the folder of a training
_COPIED_BACK = 2  # of the newest steps: the one before is there if the newest turns out to be corrupted
_LONGEST_PAUSE = 300.0  # seconds between two attempts
_WITHOUT = "`--set runtime.remote=null` does without the copy."
_AT_ONCE = 4  # files
# Beside the checkpoints, which have rules of their own: what belongs to this machine, or to this start.
_NOT_COPIED = frozenset({CHECKPOINTS, "profile", "alive", "request.json", "manifest.json"})


class Uploader:
    """Copies checkpoints, and what else a training writes, to a URL in a thread of its own.

    The newest step goes first; steps that no rule keeps are removed there as they are here. While the place does not
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
        self._sent: dict[str, Any] = {}  # file -> its length and time of change when it was copied
        self._sent_steps: dict[int, bytes] = {}  # the metadata of those that are there
        self._changed = threading.Condition()
        self._requested = self._handled = 0
        self._failure, self._closed = "", False

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
        """Wait until everything is there, or an attempt has failed.

        Args:
            seconds_left: returns how long to wait, called several times a second; None: as long as it takes.

        Returns:
            "" if everything is there, otherwise why not.
        """
        self.saved()
        with self._changed:
            requested = self._requested
            while self._handled < requested:
                left = seconds_left()
                if left is not None and left <= 0:
                    return "there was no time for it"
                self._changed.wait(0.2 if left is None else min(left, 0.2))
            return self._failure

    def _run(self) -> None:
        pause = self._retry
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._requested > self._handled)
                if self._closed:
                    return
                requested = self._requested
            try:
                self._copy()
                failure, pause = "", self._retry
            except (RemoteError, OSError) as error:
                failure = str(error)
            if failure and not self._failure:
                self.say(f"cannot copy to {self.url} now: {failure}. The training continues, and it is tried again")
            elif self._failure and not failure:
                self.say(f"copies to {self.url} again")
            with self._changed:
                self._failure, self._handled = failure, requested
                self._changed.notify_all()
                if failure and not self._changed.wait_for(
                    lambda: self._closed or self._requested > self._handled, pause
                ):
                    self._requested, pause = self._requested + 1, min(2 * pause, _LONGEST_PAUSE)

    def _copy(self) -> None:
        self._copy_others()
        steps = complete_steps(self._folder / CHECKPOINTS)
        for step in sorted(kept_steps(steps, 1, self._keep_every), reverse=True):
            self.in_use = frozenset({step})
            try:
                self._copy_step(step)
            except FileNotFoundError:
                if step in complete_steps(self._folder / CHECKPOINTS)[-1:]:
                    raise
            finally:
                self.in_use = frozenset()

    def _copy_step(self, step: int) -> None:
        folder, steps = self._folder / CHECKPOINTS / str(step), RemoteSteps(self._remote / CHECKPOINTS)
        metadata = (folder / METADATA).read_bytes()
        if self._sent_steps.get(step) == metadata:
            return
        there = steps.folder / str(step)
        if there.read(METADATA) != metadata or there.read(COMMIT) is None:  # an earlier start may have copied it
            steps.remove(step)
            names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                list(pool.map(lambda name: there.put(folder / name, name), set(names) - {COMMIT}))
            arrived = there.sizes()
            for name in set(names) - {COMMIT}:
                if arrived.get(name) != (length := (folder / name).stat().st_size):
                    raise RemoteError(f"{arrived.get(name, 0):,} of {length:,} bytes of {there.url}/{name} arrived")
            there.put(folder / COMMIT, COMMIT)
        self._sent_steps[step] = metadata
        self.newest = max(step, self.newest or 0)
        found = {other: files for other, files in steps.listing().items() if other <= step}
        complete = [other for other, files in found.items() if COMMIT in files]
        for other in found.keys() - kept_steps(complete, self._keep_last, self._keep_every):
            steps.remove(other)

    def _copy_others(self) -> None:
        found = {}
        for path in self._folder.rglob("*"):
            name = path.relative_to(self._folder).as_posix()
            hidden = any(part.startswith(".") for part in name.split("/"))
            if name.partition("/")[0] not in _NOT_COPIED and not hidden and path.is_file() and not path.is_symlink():
                found[name] = (path.stat().st_size, path.stat().st_mtime_ns)
        # Marks of complete checkpoints, such as of frozen weights, come last.
        for name in sorted(found, key=lambda name: (name.endswith(COMMIT), name)):
            if self._sent.get(name) != found[name]:
                self._remote.put(self._folder / name, name)
                self._sent[name] = found[name]
        gone = self._sent.keys() - found.keys()
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

    def download(self, step: int, folder: Path) -> str:
        """Copy a step into a folder of steps, complete or not at all; its arrays are verified when they are restored.

        Returns:
            "" if it is there, otherwise what is wrong with the copy at the URL.
        """
        there, part = self.folder / str(step), folder / f".{step}.part"
        files = there.sizes()
        if not {COMMIT, METADATA} <= files.keys():
            return "it is incomplete"
        if not all(map(is_inside, files)):
            return "the name of a file leads out of its folder"
        shutil.rmtree(part, ignore_errors=True)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(lambda name: there.get(name, part / name), files))
        shutil.rmtree(folder / str(step), ignore_errors=True)
        part.rename(folder / str(step))
        return ""

    def remove(self, step: int) -> None:
        """Remove a step, its mark first, so that half a step never looks complete."""
        there = self.folder / str(step)
        there.remove([COMMIT])
        there.remove(there.sizes())


def download_newest(url: str, folder: Path, say: Callable[[str], None]) -> list[int]:
    """Copy a training from a URL into a folder: its newest checkpoints, as far as they are newer than those here.

    Args:
        url: that an `Uploader` of the training has written to.
        folder: of the training.
        say: prints a line.

    Returns:
        The steps that were copied, newest first.

    Raises:
        UserError: the place cannot be reached.
    """
    remote, own = RemoteFolder(url), folder / CHECKPOINTS
    steps, here, copied = RemoteSteps(remote / CHECKPOINTS), max(complete_steps(own), default=-1), list[int]()
    own.mkdir(parents=True, exist_ok=True)
    with reached("runtime.remote", _WITHOUT):
        for step in sorted((step for step in steps.listing() if step > here), reverse=True):
            if len(copied) < _COPIED_BACK:
                say(f"copying step {step:,} from {url}")
                if corruption := steps.download(step, own):
                    say(f"step {step:,} at {url} is corrupted: {corruption}; the one before is taken")
                else:
                    copied.append(step)
        for name in remote.sizes() if copied else ():
            if name.partition("/")[0] not in _NOT_COPIED and is_inside(name):
                remote.get(name, folder / name)
    return copied


def forget(url: str) -> None:
    """Remove the checkpoints at a URL: the training starts from the beginning. Raises UserError."""
    remote = RemoteFolder(url)
    steps = RemoteSteps(remote / CHECKPOINTS)
    with reached("runtime.remote", _WITHOUT):
        remote.remove(["manifest.json"])
        for step in steps.listing():
            steps.remove(step)
