"""Checkpoints at a URL: written like those in a folder, the seal last, and read only if they are what was sealed."""

import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from affinage.checkpoint.remote import RemoteError, RemoteFolder, is_inside, reached
from affinage.checkpoint.seal import SEAL, damage, is_what_was_sealed, parse, unreadable
from affinage.checkpoint.steps import STEP, remove
from affinage.checkpoint.store import CheckpointStore
from affinage.errors import UserError
from affinage.secrets import masked
from affinage.signing import signing_key

CHECKPOINTS = "checkpoints"  # in the folder of a training
_AT_ONCE = 4  # files
_METADATA = "_CHECKPOINT_METADATA"  # Orbax's, with what a checkpoint says of its run


def find_steps(url: str) -> "RemoteSteps":
    """The checkpoints at a URL: of a training, or of a folder of trainings with one in it.

    Raises:
        UserError: there are none, or several trainings.
    """
    folder = RemoteFolder(url)
    with reached(url):
        names = folder.names()
        if CHECKPOINTS in names:
            return RemoteSteps(folder / CHECKPOINTS)
        if any(STEP.fullmatch(name) for name in names):
            return RemoteSteps(folder)
        trainings = [name for name in names if CHECKPOINTS in (folder / name).names()]
    if len(trainings) == 1:
        return RemoteSteps(folder / trainings[0] / CHECKPOINTS)
    if trainings:
        listed = "".join(f"\n    {folder.url}/{name}" for name in trainings)
        raise UserError("there are several trainings", where=url, fix=f"Name one of them:{listed}")
    raise UserError("there is no checkpoint", where=url, fix="Name what a recipe's `remote` says.")


class _Superseded(Exception):
    """Raised in the midst of a copy that is no longer wanted."""


class RemoteSteps:
    """The steps below a URL. See `RemoteFolder` for what is raised, and `signing_key`."""

    def __init__(self, folder: RemoteFolder) -> None:
        self.folder, self._key = folder, signing_key()

    def listing(self) -> dict[int, dict[str, Any]]:
        """{step: {bytes, complete}} of everything that is called like a step, oldest first."""
        found: dict[int, dict[str, Any]] = {}
        for name, size in self.folder.sizes().items():
            step, _, inside = name.partition("/")
            if STEP.fullmatch(step) and inside:
                facts = found.setdefault(int(step), {"bytes": 0, "complete": False})
                facts["bytes"] += size
                facts["complete"] |= inside == SEAL
        return dict(sorted(found.items()))

    def steps(self) -> list[int]:
        """Those that are completely there, oldest first."""
        return [step for step, facts in self.listing().items() if facts["complete"]]

    def seal(self, step: int) -> bytes | None:
        """The seal of a step; None if it has none, because it is not complete."""
        return self.folder.read(f"{step}/{SEAL}")

    def meta(self, step: int) -> dict[str, Any]:
        """What was saved with a step: {step, facts}; nothing if that cannot be read."""
        try:
            found = json.loads(self.folder.read(f"{step}/{_METADATA}") or b"{}")["custom_metadata"]
            return dict(found)
        except (ValueError, KeyError, TypeError, RecursionError):
            return {}

    def damage(self, step: int) -> str:
        """What is wrong with a step, as of one in a folder, of which everything is read; "" if nothing is."""
        sealed, wrong = self._sealed(step)
        if wrong:
            return wrong
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for name, digest in zip(sealed, pool.map(lambda n: self.folder.sha256(f"{step}/{n}"), sealed), strict=True):
                if digest != sealed[name]:
                    return f"{name} is not what was written"
        saved_as = self.meta(step).get("step")
        return "" if saved_as == step else f"it was saved as step {saved_as}"

    def fetch(self, step: int, folder: Path) -> str:
        """Copy a step into a folder of steps, where it is whole or not at all; "" if it is, else what is wrong with it.

        What an interrupted copy has left is gone on with.
        """
        sealed, wrong = self._sealed(step)
        if wrong:
            return wrong
        part, target = folder / f".{step}.part", folder / str(step)

        def fetch(name: str) -> None:
            if not is_what_was_sealed(part / name, sealed[name]):
                self.folder.get(f"{step}/{name}", part / name)

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(fetch, sealed))
        (part / SEAL).write_bytes(self.seal(step) or b"")
        wrong = damage(part, key=self._key)
        if wrong:
            shutil.rmtree(part)
            return wrong
        if os.path.lexists(target):
            remove(target)
        part.rename(target)
        return CheckpointStore(folder).damage(step, {})

    def _sealed(self, step: int) -> tuple[dict[str, str], str]:
        """{name: hash} of what must be there, or what is wrong with what is."""
        try:
            sealed = parse(self.seal(step) or b"", self._key)
        except ValueError as error:
            return {}, unreadable(error)
        if outside := [name for name in sealed if not is_inside(name)]:
            return {}, f"{outside[0]} leads out of its folder"
        there = (self.folder / str(step)).sizes()
        if missing := sorted(sealed.keys() - there.keys()):
            return {}, f"{missing[0]} is missing"
        if added := sorted(there.keys() - sealed.keys() - {SEAL}):
            return {}, f"{added[0]} was not there when it was sealed"
        return sealed, ""

    def bring(
        self,
        step: int,
        folder: Path,
        seal: bytes,
        done: Callable[[], None],
        superseded: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Copy a step there.

        Args:
            step: its name.
            folder: of the step.
            seal: of the step; what comes last.
            done: told of every file.
            superseded: asked before every file whether to give it up.

        Returns:
            Whether it is there; else it was given up.

        Raises:
            RemoteError: or a file has another length there than here; the step has no seal then.
        """
        there, sealed = self.folder / str(step), parse(seal)
        left = there.sizes().keys()  # of another save of this step, or of one that was cut off
        there.remove([name for name in left if name == SEAL])
        there.remove([name for name in left if name not in sealed])

        def send(name: str) -> None:
            if superseded():
                raise _Superseded
            there.put(folder / name, name)
            done()

        try:
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                list(pool.map(send, sealed))
        except _Superseded:
            return False
        arrived = there.sizes()
        for name in sealed:
            sent, found = (folder / name).stat().st_size, arrived.get(name, 0)
            if found != sent:
                raise RemoteError(masked(f"{found:,} of the {sent:,} bytes of {there.url}/{name} have arrived"))
        there.write(SEAL, seal)
        return True

    def remove(self, step: int) -> None:
        """Remove a step, its seal first: one that is half removed must not look complete."""
        there = self.folder / str(step)
        names = there.sizes()
        there.remove([SEAL] if SEAL in names else [])
        there.remove([name for name in names if name != SEAL])
