"""Results of steps at a URL, in folders named as in the store: an empty machine takes them from there.

A result is there once its manifest is, which is copied last, and is taken only if every file has the hash in it.
"""

import json
import shutil
import threading
from collections.abc import Collection, Mapping
from functools import cached_property

import fsspec

from affinage.checkpoint.remote import RemoteFolder, download_newest, is_inside
from affinage.data.token_shards import errors_at
from affinage.errors import UserError, first_line
from affinage.pipeline.models import SAVED
from affinage.pipeline.step import print_line
from affinage.pipeline.store import Request, Store, hash_on_disk, read_manifest
from affinage.results import MANIFEST, Manifest

# Large results that only the next step reads whole. From others' inputs, a report reads the small files.
_LARGE = frozenset({"ingest", "filter", "dedup", "decontaminate", "tokenize"})
_SMALL_FILE = 1_000_000  # bytes
_ANSWERS_WITHIN = 5.0  # seconds; the libraries themselves try for a minute


class RemoteResults:
    """The results at the recipe's `remote`."""

    def __init__(self, url: str, store: Store) -> None:
        """Raises UserError for a URL of an unknown kind, or whose package is missing."""
        self.url, self.failure = url.rstrip("/"), ""  # why a result was not copied there
        self._store, self._manifests = store, dict[str, Manifest | None]()
        with errors_at(self.url):
            fsspec.get_filesystem_class(fsspec.core.split_protocol(self.url)[0])

    @cached_property
    def _remote(self) -> RemoteFolder:
        return RemoteFolder(self.url)  # looks for credentials, which takes a while without a network

    def check_reachable(self) -> None:
        """Raise UserError if the place does not answer soon, for a run that needs nothing from it."""
        failures: list[Exception] = [UserError(f"no answer within {_ANSWERS_WITHIN:.0f} s")]

        def read() -> None:
            try:
                self._remote.read(MANIFEST)
                failures.clear()
            except Exception as error:
                failures[:] = [error]

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        thread.join(_ANSWERS_WITHIN)
        if failures:
            raise failures[0]

    def manifest(self, request: Request) -> Manifest | None:
        """The manifest of a result that is there; None if there is none. Raises UserError if the server is silent."""
        name = self._store.path(request).name
        if name not in self._manifests:
            text = self._remote.read(f"{name}/{MANIFEST}")
            try:
                manifest = Manifest.model_validate(json.loads(text or b"{}"))
            except (ValueError, RecursionError):
                manifest = Manifest()
            sound = manifest.key == request.key and all(map(is_inside, manifest.files))
            self._manifests[name] = manifest if sound else None
        return self._manifests[name]

    def bring(self, steps: Collection[str], requests: Mapping[str, Request], *, small: bool = False) -> None:
        """Copy the results of `steps`, and what they were made from, as far as they are there and not here.

        With `small`, only small files of large results are copied.
        """
        wanted = {name: not small or name not in _LARGE for name in steps}
        for name in reversed([*requests]):  # a step comes after those that it reads
            if name not in wanted:
                continue
            request = requests[name]
            for other in request.inputs:
                wanted.setdefault(other, other not in _LARGE)
            here = self._store.is_complete(request) or (not wanted[name] and read_manifest(self._store.path(request)))
            if not here and (manifest := self.manifest(request)) is not None:
                with self._store.making(request) as missing:
                    if missing:
                        self._fetch(request, manifest, whole=wanted[name])

    def _fetch(self, request: Request, manifest: Manifest, *, whole: bool) -> None:
        name = self._store.path(request).name
        files = {file: facts for file, facts in manifest.files.items() if whole or facts.bytes <= _SMALL_FILE}
        print_line(f"copying {name} from {self.url}: {sum(facts.bytes for facts in files.values()) / 1e6:,.1f} MB")
        part = self._store.folder / f".{name}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        for file, facts in files.items():
            self._remote.get(f"{name}/{file}", part / file)
            if hash_on_disk(part / file)["sha256"] != facts.sha256:
                fix = f"Remove its {MANIFEST}, and it is made again."
                raise UserError(f"{file} is not what was copied there", where=f"{self.url}/{name}", fix=fix)
        self._remote.get(f"{name}/{MANIFEST}", part / MANIFEST)
        self._store.discard(request)
        part.rename(self._store.path(request))

    def resume(self, request: Request, *, forced: bool) -> None:
        """Begin a training with its newest checkpoint there, where that is newer than what is here.

        If the training is `forced`, what is there is removed instead. Raises UserError if the server does not answer.
        """
        folder = self._store.path(request)
        url = f"{self.url}/{folder.name}"
        if forced:
            there = RemoteFolder(url)
            there.remove(there.sizes())
        else:  # from gs:// Orbax reads the checkpoints itself
            steps = not url.startswith("gs://")
            download_newest(url, folder, lambda line: print_line(f"{request.step}: {line}"), steps=steps)

    def put(self, request: Request) -> None:
        """Copy a complete result there; a failure is kept in `failure`, as the result is good without the copy."""
        folder = self._store.path(request)
        there, manifest = RemoteFolder(f"{self.url}/{folder.name}"), Manifest.model_validate(read_manifest(folder))
        try:
            there.remove([MANIFEST])
            sizes = there.sizes()
            for name, facts in manifest.files.items():
                # A training has copied its checkpoints itself, or read them there.
                if not (name.partition("/")[0] in SAVED and sizes.get(name) == facts.bytes):
                    there.put(folder / name, name)
            there.write(MANIFEST, (folder / MANIFEST).read_bytes())
        except (UserError, OSError) as error:
            self.failure = first_line(error)
            return
        self._manifests[folder.name] = manifest
