"""Streams a dataset of the Hugging Face Hub, or of a folder that `datasets` reads, as documents."""

import tempfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from affinage.config.data import SourceSettings
from affinage.data.files import DamagedFile, DatasetPart
from affinage.data.places import is_on_hub, limit_requests, refusal
from affinage.data.readers import needed_columns
from affinage.errors import UserError, first_line, is_of_network


def at_commit(source: SourceSettings, where: str) -> SourceSettings:
    """The settings with the commit that the dataset is at now as its revision, so that all of it is read at that one.

    Raises UserError if there is no such dataset or revision or it is gated, and TransientError if the Hub cannot be
    reached.
    """
    from huggingface_hub import HfApi

    limit_requests()
    try:
        api = HfApi()
        info = api.dataset_info(source.dataset, revision=source.revision or None, timeout=15.0)
        api.auth_check(source.dataset, repo_type="dataset")  # a gated one shows its card to everybody
    except Exception as error:  # of the Hub, and whatever a network or a proxy can come up with
        raise refusal(error, "dataset", source.dataset, revision=source.revision, where=where) from None
    return source.model_copy(update={"revision": info.sha or source.revision})


def parts_of(source: SourceSettings, where: str, *, of_text: bool) -> list[DatasetPart]:
    """A dataset in as many parts as it has files. Raises UserError if it cannot be opened.

    `source` is, of a dataset on the Hub, as `at_commit` returns it; `where` is the place in the recipe. With `of_text`
    the dataset must have the source's column of text.
    """
    place = source.dataset
    try:
        parts = max(1, _opened(source, of_text).num_shards)
    except Exception as error:
        if is_of_network(error):
            raise refusal(error, "dataset", place, revision=source.revision, where=where) from None
        fix = error.fix if isinstance(error, UserError) else ""
        raise UserError(f"cannot open the dataset {place!r}: {first_line(error)}", where=where, fix=fix) from None
    name = place if is_on_hub(source) else Path(place).name
    names = [f"{name}/{index}-of-{parts}" for index in range(parts)] if parts > 1 else [name]
    return [DatasetPart(name, index, parts) for index, name in enumerate(names)]


def read_dataset(part: DatasetPart, source: SourceSettings, of_text: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of one part of a dataset, with all columns, or those of which a document is made, and their places.

    Raises DamagedFile where it cannot be read.
    """
    dataset = _opened(source, of_text)
    try:
        rows = dataset.shard(num_shards=part.parts, index=part.index) if part.parts > 1 else dataset
        yield from ((f"{part.name}#{number}", row) for number, row in enumerate(rows, 1))
    except Exception as error:  # of `datasets`, pyarrow, the network
        if is_of_network(error) and is_on_hub(source):  # what damage loses would be lost for good
            raise refusal(error, "dataset", source.dataset, revision=source.revision, where=part.name) from None
        raise DamagedFile(f"the dataset cannot be read on: {type(error).__name__}: {first_line(error)}") from None


@lru_cache(maxsize=2)
def _opened(source: SourceSettings, of_text: bool) -> Any:
    """The streamed dataset of a source, with all columns, or those of which a document is made."""
    import datasets

    datasets.config.TORCH_AVAILABLE = False  # else each process loads torch, for data loaders that nobody uses here
    # A URL, for a folder here with the name that the Hub knows it by would be read in its place. An empty cache, for
    # where the Hub fails, what somebody loaded earlier, of whatever commit, would be taken from it.
    limit_requests()
    with tempfile.TemporaryDirectory() as empty:
        dataset = datasets.load_dataset(
            f"hf://datasets/{source.dataset}" if is_on_hub(source) else source.dataset,
            source.config or None,
            data_dir=source.data_dir or None,
            split=source.split,
            revision=source.revision or None,
            cache_dir=empty,
            streaming=True,
        )
    names = dataset.column_names
    return dataset.select_columns(needed_columns(source, names)) if of_text and names else dataset
