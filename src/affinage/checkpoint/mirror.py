"""A copy of a training at a URL, made while it goes on: for machines whose disks vanish with them."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from affinage.checkpoint.remote import RemoteError, RemoteFolder, is_inside, reached
from affinage.checkpoint.remote_steps import CHECKPOINTS, RemoteSteps
from affinage.checkpoint.seal import SEAL
from affinage.checkpoint.steps import complete_steps, kept_steps
from affinage.checkpoint.store import CheckpointStore

_LONGEST_PAUSE = 300.0  # seconds after a copy that failed until the next attempt
_REACH = 60.0  # seconds in which the place must answer at the start
_STUCK = 600.0  # seconds without a file that came to its end, after which a copy is no longer waited for
# Beside the checkpoints, which have rules of their own: what is of this machine, or of this start.
_NOT_COPIED = frozenset({CHECKPOINTS, "profile", "alive", "request.json", "manifest.json"})

Result = TypeVar("Result")


class Mirror:
    """Copies checkpoints, and what else a training writes, to a URL in a thread of its own.

    A step is there once its seal is, which comes last. The newest goes first; those that no rule keeps are removed
    there as they are here. Where nobody answers, the training goes on, and the copy is tried again.

    Use it as a context manager around the training, after `bring_newest`: once entered, it has seen that one may write
    and read there.

    Args:
        url: of the training.
        folder: of the training.
        keep_last: how many of the newest steps stay there.
        keep_every: steps at multiples of this stay for ever; None for none.
        pause: seconds after a copy that failed until the next attempt; doubled each time.
    """

    def __init__(
        self, url: str, folder: Path, *, keep_last: int = 2, keep_every: int | None = None, pause: float = 5.0
    ) -> None:
        self.url, self._pause = url, pause
        self.held: frozenset[int] = frozenset()  # steps that must stay here as long as they are copied
        self.say: Callable[[str], None] = lambda line: print(line, flush=True)
        self._remote, self._folder, self._store = RemoteFolder(url), folder, folder / CHECKPOINTS
        self._steps = RemoteSteps(self._remote / CHECKPOINTS)
        self._keep_last, self._keep_every = keep_last, keep_every
        self._there: dict[int, bytes] = {}  # seals of the steps that are there
        self._sent: dict[str, tuple[int, int]] = {}  # length and time of change of what is there beside them
        self._changed = threading.Condition()
        # How often somebody asked for a copy, and which of these the last copy that succeeded, or failed, had heard.
        self._asked = self._answered = self._failed = 0
        self._failure = ""
        self._hurry = self._ended = False
        self._files = 0  # that came to their end

    def __enter__(self) -> "Mirror":
        _reach(self._remote, self._look_around)
        threading.Thread(target=self._work, name="mirror", daemon=True).start()
        self.saved()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    @property
    def newest(self) -> int | None:
        """The newest step that is there."""
        return max(self._there, default=None)

    def saved(self) -> None:
        """There may be something new to copy; returns at once."""
        with self._changed:
            self._asked += 1
            self._changed.notify_all()

    def settle(self, seconds_left: Callable[[], float | None] = lambda: None) -> str:
        """Wait until all is there; "" if it is, else why not.

        Args:
            seconds_left: asked again and again how long to wait; None: as long as files come to their end.
        """
        with self._changed:
            self._asked += 1
            self._hurry, mine = True, self._asked
            self._changed.notify_all()
            files, since = self._files, time.monotonic()
            while self._answered < mine:
                if self._failed >= mine:
                    return self._failure
                if self._files != files:
                    files, since = self._files, time.monotonic()
                limit, left = seconds_left(), since + _STUCK - time.monotonic()
                if limit is not None and limit <= 0:
                    return "there was no time for it"
                if left <= 0:
                    return f"no file has arrived there for {_STUCK:.0f} s"
                self._changed.wait(min(left, 0.2 if limit is None else limit, 0.2))
        return ""

    def _look_around(self) -> None:
        self._remote.check()
        # What is newer there than here was damaged, or it would have been brought: it is no reason to remove others.
        newest = max(complete_steps(self._store), default=-1)
        steps = [step for step in self._steps.listing() if step <= newest]
        self._there = {step: seal for step in steps if (seal := self._steps.seal(step))}

    def _work(self) -> None:
        pause, failing = self._pause, False
        while True:
            with self._changed:
                if failing:
                    self._changed.wait_for(lambda: self._ended or self._hurry, pause)
                else:
                    self._changed.wait_for(lambda: self._ended or self._asked > self._answered)
                if self._ended:
                    return
                asked = self._asked
            try:
                self._copy()
            except (RemoteError, OSError) as error:
                if not failing:
                    self.say(f"the copy at a URL has to wait: {error}. The training goes on, and it is tried again")
                pause, failing = min(2 * pause, _LONGEST_PAUSE) if failing else self._pause, True
                with self._changed:
                    self._failed, self._failure, self._hurry = asked, str(error), self._asked > asked
                    self._changed.notify_all()
                continue
            if failing:
                self.say(f"the copy at a URL goes on: {self.url}")
            failing = False
            with self._changed:
                self._answered, self._hurry = asked, self._hurry and self._asked > asked
                self._changed.notify_all()

    def _copy(self) -> None:
        """Bring there whatever is missing there."""
        while True:
            self._copy_others()  # first: what is beside a step may be newer than the step, as after a kill, not older
            step = self._next()
            if step is None:
                return
            self.held = frozenset({step})
            try:
                self._copy_step(step)
            except FileNotFoundError:
                if self._seal_here(step):
                    raise  # a part of it is gone: damaged, and tried again when there is a newer one
                continue  # no rule keeps it any more
            finally:
                self.held = frozenset()

    def _next(self) -> int | None:
        """The step to copy: the newest, or one that stays for ever."""
        steps = complete_steps(self._store)
        wanted = {*steps[-1:], *(step for step in steps if self._keep_every and step % self._keep_every == 0)}
        missing = [step for step in wanted if (seal := self._seal_here(step)) and self._there.get(step) != seal]
        return max(missing, default=None)

    def _seal_here(self, step: int) -> bytes:
        try:
            return (self._store / str(step) / SEAL).read_bytes()
        except OSError:
            return b""

    def _copy_step(self, step: int) -> None:
        seal = self._seal_here(step)

        def superseded() -> bool:
            return self._hurry and complete_steps(self._store)[-1:] > [step]

        self._there.pop(step, None)
        if not self._steps.bring(step, self._store / str(step), seal, self._file_done, superseded):
            return
        self._there[step] = seal
        kept = kept_steps(sorted(self._there), self._keep_last, self._keep_every)
        for old in self._steps.listing():
            if old not in kept and old < max(kept):
                self._there.pop(old, None)
                self._steps.remove(old)

    def _copy_others(self) -> None:
        found = dict(_beside(self._folder))
        changed = [name for name, state in found.items() if self._sent.get(name) != state]
        # Of a folder with a seal, such as frozen weights, the seal comes last.
        for name in sorted(changed, key=lambda name: (name.endswith(SEAL), name)):
            try:
                self._remote.put(self._folder / name, name)
            except FileNotFoundError:
                continue
            self._sent[name] = found[name]
            self._file_done()
        gone = sorted(self._sent.keys() - found.keys())
        self._remote.remove(gone)
        for name in gone:
            del self._sent[name]

    def _file_done(self) -> None:
        with self._changed:
            self._files += 1
            self._changed.notify_all()


def bring_newest(url: str, folder: Path, say: Callable[[str], None], *, reach: float = _REACH) -> int | None:
    """Copy a training from a URL into a folder, if there is a newer whole checkpoint there than here.

    Args:
        url: that a `Mirror` of the training has written to.
        folder: of the training.
        say: told what is passed over, and what is done.
        reach: seconds in which the place must answer.

    Returns:
        The step that was copied; None if what is here is as new, or there is nothing there.

    Raises:
        UserError: the place cannot be reached.
    """
    remote = RemoteFolder(url)
    steps, store = RemoteSteps(remote / CHECKPOINTS), CheckpointStore(folder / CHECKPOINTS)
    there, here = _reach(remote, steps.steps, reach), store.steps()
    for step in sorted({*there, *here}, reverse=True):
        if step in here and not store.damage(step):
            return None
        if step not in there:
            continue
        say(f"copying step {step:,} from {url}")
        with _reached():
            damage = steps.fetch(step, store.folder)
            if not damage:
                _fetch_others(remote, folder)
                return step
        say(f"step {step:,} at {url} is damaged: {damage}; the one before is taken")
    return None


def forget(url: str) -> None:
    """Remove the checkpoints at a URL: the training begins anew. Raises UserError if nobody answers there."""
    remote = RemoteFolder(url)
    steps = RemoteSteps(remote / CHECKPOINTS)
    found = _reach(remote, steps.listing)
    with _reached():
        remote.remove(["manifest.json"])
        for step in found:
            steps.remove(step)


def _fetch_others(remote: RemoteFolder, folder: Path) -> None:
    for name in remote.sizes():
        if name.partition("/")[0] in _NOT_COPIED or not is_inside(name):
            continue
        part = folder / f".{name.replace('/', '-')}.part"
        remote.get(name, part)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        part.replace(folder / name)


def _beside(folder: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    """What a training has written beside its checkpoints, with length and time of change."""
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        if entry.name in _NOT_COPIED or entry.name.startswith("."):
            continue
        for path in [entry] if not entry.is_dir() else sorted(entry.rglob("*")):
            try:
                if path.is_file() and not path.is_symlink() and not path.name.startswith("."):
                    status = os.stat(path)
                    yield path.relative_to(folder).as_posix(), (status.st_size, status.st_mtime_ns)
            except FileNotFoundError:
                continue


def _reach(remote: RemoteFolder, ask: Callable[[], Result], seconds: float = _REACH) -> Result:
    """What `ask` returns, if the place answers in time."""
    found: list[Result] = []
    failed = [RemoteError(f"{remote.url} does not answer within {seconds:g} s")]

    def asking() -> None:
        try:
            found.append(ask())
        except RemoteError as error:
            failed.append(error)

    thread = threading.Thread(target=asking, name="reach", daemon=True)
    thread.start()
    thread.join(seconds)
    with _reached():
        if not found:
            raise failed[-1]
    return found[0]


def _reached() -> AbstractContextManager[None]:
    return reached("runtime.remote", "`--set runtime.remote=null` does without the copy.")
