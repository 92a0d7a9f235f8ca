"""Results of steps at a URL, in folders named as in the store: an empty machine takes them from there.

A result is there once its manifest is, which is copied last, and is taken only if every file has the hash in it.
"""

import shutil
from collections.abc import Collection, Mapping

from affinage.checkpoint.remote import RemoteFolder, download
from affinage.errors import UserError, first_line
from affinage.network import is_inside
from affinage.pipeline.models import SAVED
from affinage.pipeline.step import print_line
from affinage.pipeline.store import COPIED, Request, Store, hash_on_disk, read_manifest
from affinage.results import MANIFEST, Manifest

# Large results that only the next step reads whole. Of the others a report reads the small files.
_LARGE = frozenset({"ingest", "filter", "dedup", "decontaminate", "tokenize"})
_SMALL_FILE = 1_000_000  # bytes


class RemoteResults:
    """The results at the recipe's `remote`."""

    def __init__(self, url: str, store: Store) -> None:
        self.url, self.failure = url.rstrip("/"), ""  # why a result was not copied there
        self._store, self._manifests = store, dict[str, Manifest | None]()

    def manifest(self, request: Request) -> Manifest | None:
        """The manifest of a result that is there; None if there is none. Raises UserError if the server is silent."""
        name = self._store.path(request).name
        if name not in self._manifests:
            text = RemoteFolder(f"{self.url}/{name}").read(MANIFEST)
            try:
                manifest = Manifest.model_validate_json(text or b"{}")
            except ValueError:
                manifest = Manifest()
            sound = manifest.key == request.key and all(map(is_inside, manifest.files))
            self._manifests[name] = manifest if sound else None
        return self._manifests[name]

    def bring(self, requests: Mapping[str, Request], read: Collection[str] = ()) -> None:
        """Copy the results that are there and not here: of large ones that no step of `read` made, the small files."""
        for name, request in requests.items():
            whole = name in read or name not in _LARGE
            here = self._store.is_complete(request) or (not whole and read_manifest(self._store.path(request)))
            if not here and (manifest := self.manifest(request)) is not None:
                with self._store.making(request) as missing:
                    if missing:
                        self._fetch(request, manifest, whole=whole)

    def _fetch(self, request: Request, manifest: Manifest, *, whole: bool) -> None:
        name = self._store.path(request).name
        there = RemoteFolder(f"{self.url}/{name}")
        files = {file: facts for file, facts in manifest.files.items() if whole or facts.bytes <= _SMALL_FILE}
        print_line(f"copying {name} from {self.url}: {sum(facts.bytes for facts in files.values()) / 1e6:,.1f} MB")
        part = self._store.folder / f".{name}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        for file, facts in files.items():
            there.get(file, part / file)
            if hash_on_disk(part / file)["sha256"] != facts.sha256:
                fix = f"Remove its {MANIFEST}, and it is made again."
                raise UserError(f"{file} is not what was copied there", where=f"{self.url}/{name}", fix=fix)
        there.get(MANIFEST, part / MANIFEST)
        (part / COPIED).write_text(self.url)
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
            newest = 0 if url.startswith("gs://") else 2
            download(url, folder, lambda line: print_line(f"{request.step}: {line}"), newest=newest)

    def is_copied(self, request: Request) -> bool:
        """Whether a result that is here is there too, which was noted when it was copied: no network is needed."""
        mark = self._store.path(request) / COPIED
        return mark.is_file() and mark.read_text() == self.url

    def put(self, request: Request, *, made: bool = True) -> None:
        """Copy a complete result there, if it was `made` now or is not there; what fails is kept in `failure`."""
        folder = self._store.path(request)
        try:
            if not made and self.manifest(request) is not None:
                (folder / COPIED).write_text(self.url)
                return
            there, manifest = RemoteFolder(f"{self.url}/{folder.name}"), Manifest.model_validate(read_manifest(folder))
            there.remove([MANIFEST])
            sizes = there.sizes()
            for name, facts in manifest.files.items():
                # A training has copied its checkpoints itself, or read them there.
                if not (name.partition("/")[0] in SAVED and sizes.get(name) == facts.bytes):
                    there.put(folder / name, name)
            there.write(MANIFEST, (folder / MANIFEST).read_bytes())
            (folder / COPIED).write_text(self.url)
            self._manifests[folder.name] = manifest
        except (UserError, OSError) as error:
            self.failure = first_line(error)
