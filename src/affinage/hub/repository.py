"""Repositories of the Hugging Face Hub: downloads and uploads."""

import os
import re
import sys
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HFValidationError, HTTPError
from huggingface_hub.utils import disable_progress_bars

from affinage.data.hub_answers import limit_requests, refusal
from affinage.errors import UserError, of_the_machine
from affinage.paths import from_home

# All that an import reads. Files that can run code (*.py, *.bin, *.pt) are not downloaded.
_PATTERNS = ["config.json", "*.safetensors", "model.safetensors.index.json", "tokenizer*.json", "*.model"]
_PATTERNS += ["generation_config.json", "special_tokens_map.json"]
_PATTERNS += ["characters.json", "chat_template.jinja", "README.md"]
_COMMIT_TIMEOUT = 1800.0  # seconds that a Hub may take to look through what was uploaded
_REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?")
_ERRORS = (HTTPError, OSError, HFValidationError)


def local_copy(folder_or_id: str) -> Path:
    """Return the folder itself, or a copy of the repository with this id, from the cache if it is there already.

    Raises UserError if there is no such folder, and the hub has no such repository or cannot be reached.
    """
    folder = from_home(folder_or_id)
    if folder.is_dir():
        return folder
    if not _REPOSITORY.fullmatch(folder_or_id) or folder_or_id.startswith("."):
        raise UserError(f"there is no folder `{folder_or_id}`", fix="Name a folder, or a repository such as gpt2.")
    limit_requests()
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        return Path(snapshot_download(folder_or_id, allow_patterns=_PATTERNS))
    except _ERRORS as error:
        if of_the_machine(error) is not None:  # a full disk is not the Hub's
            raise
        refused = refusal(error, "model", folder_or_id)
        raise UserError(f"there is no folder `{folder_or_id}`, and {refused.what}", fix=refused.fix) from error


def push(folder: Path, repository: str, *, private: bool = True, endpoint: str | None = None) -> str:
    """Upload an exported folder as a model repository, made if it does not exist; returns its address.

    The token is what huggingface_hub finds in the environment (HF_TOKEN) or in its login. `endpoint` is the address
    of another hub than huggingface.co; HF_ENDPOINT sets it, too.
    """
    api = HfApi(endpoint=endpoint)
    limit_requests(_COMMIT_TIMEOUT)
    try:
        made = api.create_repo(repository, repo_type="model", private=private, exist_ok=True)
        message = "Export of affinage"
        api.upload_folder(folder_path=folder, repo_id=made.repo_id, repo_type="model", commit_message=message)
    except _ERRORS as error:
        if of_the_machine(error) is not None:
            raise
        token = "" if os.environ.get("HF_TOKEN") else " HF_TOKEN is not set; a token that may write is needed."
        raise UserError(
            f"{folder} is written, but could not be uploaded: {refusal(error, 'model', repository).what}",
            where=repository,
            fix=f"Repeat it with `hf upload {repository} {folder}` once the hub can be reached.{token}",
        ) from error
    return str(made)
