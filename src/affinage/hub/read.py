"""A Hugging Face folder as a graph with its weights. Only JSON and safetensors are read: nothing in it can run."""

import contextlib
import hashlib
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from huggingface_hub import HfApi, metadata_load, snapshot_download
from huggingface_hub.errors import HFValidationError, HTTPError
from huggingface_hub.utils import disable_progress_bars
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from affinage.data.chat import system_prompt_in
from affinage.data.hub_answers import limit_requests, refusal
from affinage.data.json_files import read_object
from affinage.data.tokenizer import template_in
from affinage.errors import UserError, of_the_machine
from affinage.hub.families import FAMILIES, Architecture, architecture_of
from affinage.model.graph import Graph, parse
from affinage.model.layer import PyTree
from affinage.results import read_json

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
_SAMPLING = ("do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_DTYPES = ("F16", "BF16", "F32", "F64")  # others belong to quantized weights, or are no weights
_UNREADABLE = (SafetensorError, TypeError, ValueError, AttributeError, OverflowError)  # all but the first are NumPy's
# Buffers in old files that follow from the configuration: GPT-2's masks, Llama's frequencies.
_BUFFERS = re.compile(r"(.*\.)?(attn\.(masked_)?bias|rotary_emb\.inv_freq)")
_AGAIN = "Download the model again, all of it."
# All that an import reads. Files that can run code (*.py, *.bin, *.pt) are not downloaded.
_PATTERNS = ["*.json", "*.safetensors", "*.model", "chat_template.jinja", "README.md"]
_COMMIT_TIMEOUT = 1800.0  # seconds that a hub may take to look through what was uploaded
_REPOSITORY = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")


def local_copy(folder_or_id: str) -> Path:
    """Return the folder itself, or a copy of the repository with this id, from the cache if it is there already.

    Raises UserError if there is no such folder, and the hub has no such repository or cannot be reached.
    """
    folder = Path(os.path.expanduser(folder_or_id))
    if folder.is_dir():
        return folder
    if not _REPOSITORY.fullmatch(folder_or_id):
        raise UserError(f"there is no folder `{folder_or_id}`", fix="Name a folder, or a repository such as gpt2.")
    if not sys.stderr.isatty():
        disable_progress_bars()
    with _answers_of_the_hub(folder_or_id, f"there is no folder `{folder_or_id}`, and "):
        limit_requests()
        return Path(snapshot_download(folder_or_id, allow_patterns=_PATTERNS))


def push(folder: Path, repository: str, *, private: bool) -> str:
    """Upload an exported folder as a model repository, which is made if it does not exist, and return its address.

    huggingface_hub takes the token from HF_TOKEN or its login, and the hub's address from HF_ENDPOINT. Raises UserError
    if the hub refuses or cannot be reached.
    """
    token = "" if os.environ.get("HF_TOKEN") else " HF_TOKEN is not set; a token that may write is needed."
    fix = f"Repeat it with `hf upload {repository} {folder}`.{token}"
    with _answers_of_the_hub(repository, f"{folder} is written, but could not be uploaded: ", fix):
        limit_requests(_COMMIT_TIMEOUT)
        api = HfApi()
        made = api.create_repo(repository, repo_type="model", private=private, exist_ok=True)
        api.upload_folder(folder_path=folder, repo_id=made.repo_id, commit_message="Export of affinage")
        return str(made)


@contextlib.contextmanager
def _answers_of_the_hub(repository: str, what: str, fix: str = "") -> Iterator[None]:
    try:
        yield
    except (HTTPError, OSError, HFValidationError) as error:
        if of_the_machine(error) is not None:  # a full disk is not the Hub's
            raise
        refused = refusal(error, "model", repository)
        raise UserError(what + refused.what, fix=fix or refused.fix) from error


@dataclass(frozen=True)
class HubModel:
    """A model of the hub, without its tokenizer."""

    architecture: Architecture
    graph: Graph
    params: PyTree  # float32, which holds every dtype of the hub exactly
    weights: "HubWeights"


def hub_facts(folder: Path) -> dict[str, Any]:
    """Return what a folder says of its model beside the weights, in the form of model.json.

    `system_prompt` is the default one of a chat model that affinage exported, `chat_template` the one of any other.
    `imported` holds whether it is a chat model, and of its `release` the license, which is that in the front matter of
    README.md or None, and the sampling settings of generation_config.json.
    """
    template, card = template_in(folder), dict[str, Any]()
    system_prompt = None if template is None else system_prompt_in(template)
    with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
        card = metadata_load(folder / "README.md") or {}
    license, settings = card.get("license"), read_json(folder / "generation_config.json")
    sampling = {name: settings[name] for name in _SAMPLING if isinstance(settings.get(name), int | float)}
    release = {"license": license if isinstance(license, str) else None, "sampling": sampling}
    facts = {"system_prompt": system_prompt or "", "imported": {"chat": template is not None, "release": release}}
    return facts if system_prompt is not None or template is None else facts | {"chat_template": template}


def read_hub_folder(folder: Path) -> HubModel:
    """Read config.json and the weights, in one file or in several with an index.

    Raises UserError for a family, a configuration value or a tensor that has no place in a graph; it is named.
    """
    config = folder / CONFIG
    if not config.is_file():
        fix = "A model of Hugging Face is a folder with config.json, safetensors and tokenizer.json."
        raise UserError(f"this is no model: there is no {CONFIG}", where=str(folder), fix=fix)
    try:
        architecture = architecture_of(read_object(config), str(config))
        graph = parse(architecture.model)
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        fix = "Compare it with the config.json of the original model."
        raise UserError(f"a value in it is not what it should be: {error}", where=str(config), fix=fix) from error
    weights = HubWeights(folder)
    try:
        params = FAMILIES[architecture.family].from_tensors(weights, graph)
        unread = [name for name in weights if name not in weights.names_read and not _BUFFERS.fullmatch(name)]
        shared = graph[graph.logits].layer.shares
        if shared is not None and "lm_head.weight" in unread:
            if not np.array_equal(weights["lm_head.weight"], params[shared]["embedding"]):
                fix = "Set `tie_word_embeddings` to false if the model was trained that way."
                raise UserError(f"{CONFIG} ties the unembedding, but lm_head.weight is another matrix", fix=fix)
            unread.remove("lm_head.weight")
        if unread:
            fix = "Take config.json and the weights from the same model; adapters are merged before an import."
            raise UserError(f"the architecture has no place for the tensors {', '.join(unread[:5])}", fix=fix)
    except UserError as error:
        raise UserError(error.what, where=error.where or str(folder), fix=error.fix) from error
    return HubModel(architecture, graph, params, weights)


class HubWeights(dict[str, Any]):
    """The tensors of a folder by name, read one by one in the dtype of the file; every one must be finite."""

    def __init__(self, folder: Path) -> None:
        """Raises UserError for files that are missing, cut, or not those of the index."""
        self._folder, self._files = folder, dict[str, Any]()
        self._last: tuple[str, NDArray[Any]] | None = None  # tensors that hold several parameters are read in a row
        self.names_read: set[str] = set()
        index, whole = folder / INDEX, folder / WHOLE
        if index.is_file() == whole.is_file():  # of both, transformers would read the whole file
            fix = "Only safetensors are read: other files of weights can run code. Keep those of the model alone."
            raise UserError(f"there must be either {WHOLE} or {INDEX}, not both or none", where=str(folder), fix=fix)
        listed: Any = {"": WHOLE} if whole.is_file() else read_object(index).get("weight_map")
        for file in listed.values() if isinstance(listed, dict) else [None]:
            if not isinstance(file, str) or Path(file).name != file or not (folder / file).is_file():
                what = f"it does not say in which file here each tensor is, but names {file}"
                raise UserError(what, where=str(index), fix=_AGAIN)
            try:
                self._files[file] = self._files.get(file) or safe_open(folder / file, framework="numpy")
            except SafetensorError as error:
                what = f"this is not a whole safetensors file: {error}"
                raise UserError(what, where=str(folder / file), fix=_AGAIN) from error
        places = ((name, file) for file, opened in self._files.items() for name in opened.keys())  # noqa: SIM118
        super().__init__({name: file for name, file in places if listed.get(name, file) == file})

    def __getitem__(self, name: str) -> NDArray[Any]:
        self.names_read.add(name)
        if self._last is not None and self._last[0] == name:
            return self._last[1]
        file = super().__getitem__(name)
        where, opened = str(self._folder / file), self._files[file]
        try:
            dtype = opened.get_slice(name).get_dtype()
            tensor: NDArray[Any] = opened.get_tensor(name) if dtype in _DTYPES else np.empty(0)
        except _UNREADABLE as error:  # such as a shape of 65 axes
            raise UserError(f"the tensor {name!r} cannot be read: {error}", where=where, fix=_AGAIN) from error
        if dtype not in _DTYPES:
            fix = "Take a version of the model in float16, bfloat16, float32 or float64."
            raise UserError(f"the tensor {name!r} has the dtype {dtype}", where=where, fix=fix)
        if not np.isfinite(tensor).all():
            fix = "The weights are damaged, or the training diverged: take an earlier version of the model."
            raise UserError(f"the tensor {name!r} holds values that are not finite", where=where, fix=fix)
        self._last = name, tensor
        return tensor

    def digest(self) -> str:
        """Return the SHA-256 of the files, hexadecimal; reads them once more."""
        digest = hashlib.sha256()
        for name in sorted(self._files):
            with open(self._folder / name, "rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()
