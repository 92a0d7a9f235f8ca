"""Repositories of the Hugging Face Hub: a copy here of one that is there, and back."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HFValidationError, HTTPError
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from affinage.data.hub_answers import limit_requests, refusal
from affinage.errors import UserError, of_the_machine
from affinage.paths import from_home

# All that an import reads. Files that can run code (*.py, *.bin, *.pt) never reach the machine.
_PATTERNS = ["config.json", "*.safetensors", "model.safetensors.index.json", "tokenizer*.json", "*.model"]
_PATTERNS += ["generation_config.json", "special_tokens_map.json"]
_PATTERNS += ["characters.json", "chat_template.jinja", "README.md"]
_TO_COMMIT = 1800.0  # seconds that a Hub may take to answer what it was given, which it must look through
_REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?")


def local_copy(folder_or_id: str) -> Path:
    """The folder itself, or a copy of the repository with this id, from the cache if it is there already.

    Raises:
        UserError: there is no such folder, and the hub has no such repository or cannot be reached.
    """
    folder = from_home(folder_or_id)
    if folder.is_dir():
        return folder
    if not _REPOSITORY.fullmatch(folder_or_id) or folder_or_id.startswith("."):
        raise UserError(f"there is no folder `{folder_or_id}`", fix="Name a folder, or a repository such as gpt2.")
    limit_requests()
    try:
        with _bars_on_terminals_alone():
            return Path(snapshot_download(folder_or_id, allow_patterns=_PATTERNS))
    except (HTTPError, OSError, HFValidationError) as error:
        if of_the_machine(error) is not None:  # a full disk is not the Hub's
            raise
        told = refusal(error, "model", folder_or_id)
        raise UserError(f"there is no folder `{folder_or_id}`, and {told.what}", fix=told.fix) from error


def push(folder: Path, repository: str, *, private: bool = True, endpoint: str | None = None) -> str:
    """Upload an exported folder as a model repository, made if it is not there; returns its address.

    The token is what huggingface_hub finds in the environment (HF_TOKEN) or in its login. `endpoint` is the address
    of another hub than huggingface.co; HF_ENDPOINT sets it, too.
    """
    api = HfApi(endpoint=endpoint)
    limit_requests(_TO_COMMIT)
    try:
        made = api.create_repo(repository, repo_type="model", private=private, exist_ok=True)
        api.upload_folder(
            folder_path=folder, repo_id=made.repo_id, repo_type="model", commit_message="Export of affinage"
        )
    except (HTTPError, OSError, HFValidationError) as error:
        if of_the_machine(error) is not None:
            raise
        asked = "" if os.environ.get("HF_TOKEN") else " HF_TOKEN is not set; a token that may write is needed."
        raise UserError(
            f"{folder} is written, but could not be uploaded: {refusal(error, 'model', repository).what}",
            where=repository,
            fix=f"Repeat it with `hf upload {repository} {folder}` once the hub can be reached.{asked}",
        ) from error
    return str(made)


@contextmanager
def _bars_on_terminals_alone() -> Iterator[None]:
    if sys.stderr.isatty() or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
