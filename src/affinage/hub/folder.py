"""A model as the folder that Hugging Face's libraries load: read, and written with its card; adapters as PEFT does.

Of a folder only JSON and safetensors are read: nothing in it can run.
"""

import contextlib
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
import yaml
from huggingface_hub import (
    ModelCard,
    ModelCardData,
    metadata_load,
    snapshot_download,
    split_state_dict_into_shards_factory,
)
from huggingface_hub.errors import HFValidationError, HTTPError
from huggingface_hub.utils import disable_progress_bars
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from affinage import __version__
from affinage.data.chat import chat_template, system_prompt_in, with_default_system
from affinage.data.special_tokens import BOS, CODE, CONTROL_PIECES, ENDCODE, EOS, IM_END, IM_START, PAD, UNK
from affinage.data.tokenizer import CONFIG as TOKENIZER_CONFIG
from affinage.data.tokenizer import TEMPLATE, Tokenizer, template_in
from affinage.errors import UserError, of_the_machine
from affinage.generation.engine import LoadedModel
from affinage.hub.families import FAMILIES, Architecture, architecture_of, decoder_nodes, family_of
from affinage.json_files import read_object, whole_folder, write_atomically, write_json
from affinage.model import Adapters
from affinage.model.graph import Graph, parameters, parse
from affinage.model.layer import PyTree
from affinage.model.lora import LORA_A, LORA_B
from affinage.network import limit_requests, refusal
from affinage.results import read_json

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
_DTYPES = ("F16", "BF16", "F32", "F64")  # others belong to quantized weights, or are no weights
# Buffers in old files that follow from the configuration: GPT-2's masks, Llama's frequencies.
_BUFFERS = re.compile(r"(.*\.)?(attn\.(masked_)?bias|rotary_emb\.inv_freq)")
_AGAIN = "Download the model again, all of it."
# All that an import reads. Files that can run code (*.py, *.bin, *.pt) are not downloaded.
_PATTERNS = ["*.json", "*.safetensors", "*.model", "chat_template.jinja", "README.md"]
DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
_TEMPLATES = Path(__file__).parent / "templates"


def local_copy(folder_or_id: str) -> Path:
    """Return the folder itself, or a copy of the repository with this id, from the cache if it is there already.

    Raises UserError if there is no such folder, and the hub has no such repository or cannot be reached.
    """
    folder = Path(os.path.expanduser(folder_or_id))
    if folder.is_dir():
        return folder
    if not sys.stderr.isatty():
        disable_progress_bars()
    limit_requests()
    try:
        return Path(snapshot_download(folder_or_id, allow_patterns=_PATTERNS))
    except (HTTPError, OSError, HFValidationError) as error:
        if of_the_machine(error) is not None:  # a full disk is not the Hub's
            raise
        refused = refusal(error, "model", folder_or_id)
        what = f"there is no folder `{folder_or_id}`, and {refused.what}"
        raise UserError(what, fix=refused.fix) from error


class HubModel(NamedTuple):
    """A model of the hub, without its tokenizer."""

    architecture: Architecture
    graph: Graph
    params: PyTree  # float32, which holds every dtype of the hub exactly


def hub_facts(folder: Path) -> dict[str, Any]:
    """Return what a folder says of its model beside the weights, in the form of model.json.

    `system_prompt` is the default one of a chat model that affinage exported, `chat_template` the one of any other.
    `imported` holds whether it is a chat model, and of its `release` the license in README.md's front matter or None.
    """
    template, card = template_in(folder), dict[str, Any]()
    system_prompt = None if template is None else system_prompt_in(template)
    with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
        card = metadata_load(folder / "README.md") or {}
    release = {"license": license if isinstance(license := card.get("license"), str) else None}
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
        graph = parse(architecture.model, lambda _: str(config))
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
    return HubModel(architecture, graph, params)


class HubWeights(dict[str, Any]):
    """The tensors of a folder by name, read one by one in the dtype of the file; every one must be finite."""

    def __init__(self, folder: Path) -> None:
        """Raises UserError for files that are missing, cut, or not those of the index."""
        self._folder, self._files = folder, dict[str, Any]()
        self._last: tuple[str, NDArray[Any]] | None = None  # fused experts are read from one tensor, in a row
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
        except Exception as error:  # of NumPy, too, such as a shape of 65 axes
            raise UserError(f"the tensor {name!r} cannot be read: {error}", where=where, fix=_AGAIN) from error
        if dtype not in _DTYPES:
            fix = "Take a version of the model in float16, bfloat16, float32 or float64."
            raise UserError(f"the tensor {name!r} has the dtype {dtype}", where=where, fix=fix)
        if not (np.abs(tensor) <= np.finfo(np.float32).max if dtype == "F64" else np.isfinite(tensor)).all():
            fix = "The weights are damaged, or the training diverged: take an earlier version of the model."
            raise UserError(f"the tensor {name!r} holds values that are not finite", where=where, fix=fix)
        self._last = name, tensor
        return tensor


@dataclass(frozen=True)
class CardFacts:
    """What a run knows about its model. A section without facts is left out of the card."""

    license: str | None  # SPDX identifier of the weights; None where it is not known
    tuned: bool = False  # to answer in conversations, by sft or dpo; a chat template alone is no sign of that
    language: str = "en"  # of the card: en or fr
    summary: str = ""  # of the run, in one line
    description: str = ""
    command: str = ""  # that makes this model again
    languages: Sequence[str] = ()  # ISO 639-1, of the text
    sources: Sequence[Mapping[str, Any]] = ()  # of the training text: name, licence, documents, bytes
    training: Mapping[str, Any] = field(default_factory=dict)  # label -> value, e.g. {"Tokens": 1_000_000}
    # label ("base", "sft") -> task -> metric -> {"value", "stderr", "chat_template"}
    results: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def export(
    model: LoadedModel,
    folder: Path,
    *,
    facts: CardFacts,
    dtype: str = "float32",
    place: str = "",
    max_shard_size: int = 5_000_000_000,
) -> dict[str, Any]:
    """Write `folder`: configuration, weights in safetensors, tokenizer, chat template for chat models, and a card.

    The folder appears whole or not at all, in place of one that was there. The same model gives the same bytes. A
    weight file holds at most `max_shard_size` bytes. The card loads it from `place`, by default the folder's name.
    Returns the files with their sizes. Raises UserError for graphs that no architecture of transformers computes, and
    for weights that `dtype` cannot hold.
    """
    with whole_folder(folder) as partial:
        family, tokenizer = family_of(model.graph), model.tokenizer
        ids = {"bos_token_id": tokenizer.bos, "pad_token_id": tokenizer.pad}
        # Transformers 5 reads "dtype", transformers 4 "torch_dtype".
        config = ids | {"eos_token_id": tokenizer.eos, "dtype": dtype, "torch_dtype": dtype}
        write_json(partial / "config.json", family.to_config(model.graph, context=model.context) | config)
        generation = ids | {"eos_token_id": list(tokenizer.stops), "do_sample": False}
        write_json(partial / "generation_config.json", generation)
        tensors = family.to_tensors(jax.device_get(model.params), model.graph)
        _write_weights(
            {name: _converted(name, tensor, dtype) for name, tensor in tensors.items()}, partial, max_shard_size
        )
        system_prompt = model.system_prompt if model.chat else ""
        write_hf_tokenizer(tokenizer, partial, context=model.context, chat=model.chat, system_prompt=system_prompt)
        write_atomically(partial / "README.md", model_card(model, facts, place or folder.name).encode())
    return {"dtype": dtype, "parameters": parameters(model.graph).total, "files": _sizes(folder)}


def _sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}


def _converted(name: str, tensor: NDArray[Any], dtype: str) -> NDArray[Any]:
    """The tensor in the exported dtype. Raises UserError if it holds no finite numbers, before or after."""
    with np.errstate(over="ignore"):
        converted = np.ascontiguousarray(tensor.astype(DTYPES[dtype]))
    if np.isfinite(converted).all():
        return converted
    what = f"the tensor {name} has values that are not finite in {dtype}"
    raise UserError(what, fix="Export it as bfloat16 or float32; if the training diverged, an earlier MODEL@STEP.")


def _write_weights(tensors: dict[str, NDArray[Any]], folder: Path, max_shard_size: int) -> None:
    """One file, or numbered ones with an index, as transformers' save_pretrained would lay them out."""
    split = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    for filename, names in split.filename_to_tensors.items():
        _save({name: tensors[name] for name in names}, folder / filename)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": dict(sorted(split.tensor_to_filename.items()))}
        write_json(folder / "model.safetensors.index.json", index)


def _save(tensors: dict[str, NDArray[Any]], file: Path) -> None:
    save_file(tensors, file, metadata={"format": "pt"})
    json_file = next(file.parent.glob("*config.json"))
    file.chmod(json_file.stat().st_mode)  # safetensors makes files of its owner alone


def write_hf_tokenizer(
    tokenizer: Tokenizer, folder: Path, *, context: int, chat: bool = True, system_prompt: str = ""
) -> None:
    """Write tokenizer.json and tokenizer_config.json, which transformers' AutoTokenizer loads.

    `context` is the model's longest input in tokens. A chat model gets the chat template it was trained with, with
    `system_prompt` as its default; of ChatML it ends its turns with <|im_end|>, any other with </s>. Text that spells a
    control token stays text only with `split_special_tokens=True`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.write(folder)
    if not (chat or tokenizer.fixed_ids):
        return
    if not tokenizer.fixed_ids and tokenizer.template is None and tokenizer.opening not in ((), (tokenizer.bos,)):
        what = f"no chat template can begin a text with the ids {list(tokenizer.opening)}"
        raise UserError(what, where=str(folder), fix="Export the base model.")
    (folder / TEMPLATE).unlink(missing_ok=True)  # of another export, beside which it would win
    config = read_json(folder / TOKENIZER_CONFIG)
    if tokenizer.fixed_ids:
        config = {
            # LlamaTokenizer would rebuild the tokenizer with a space before the text; this class takes the file as is.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": CONTROL_PIECES[BOS],
            "eos_token": CONTROL_PIECES[IM_END if chat else EOS],
            "pad_token": CONTROL_PIECES[PAD],
            "unk_token": CONTROL_PIECES[UNK],
            "additional_special_tokens": [CONTROL_PIECES[i] for i in (CODE, ENDCODE, IM_START, IM_END)],
            "add_bos_token": False,
            "add_prefix_space": False,  # llama.cpp would add a space before the text and after every control token
            "clean_up_tokenization_spaces": False,
            "model_input_names": ["input_ids", "attention_mask"],
            "model_max_length": context,
        }
    if chat:
        own, opened = tokenizer.template, bool(tokenizer.opening)
        chatml = chat_template(system_prompt, opened=opened)
        config["chat_template"] = chatml if own is None else with_default_system(own.source, system_prompt)
    write_json(folder / TOKENIZER_CONFIG, config)


def model_card(model: LoadedModel, facts: CardFacts, place: str) -> str:
    """Return README.md of a released model; `place` is the folder or repository that the usage loads."""
    tokenizer = model.tokenizer
    # What every training text began with; other tokenizers than affinage's own add it by themselves.
    opening = tokenizer.pieces[tokenizer.bos] if tokenizer.fixed_ids else ""

    def number(value: Any) -> str:
        """A number as readers of the card's language write it; anything else as it is."""
        if not isinstance(value, int | float):
            return str(value)
        written = f"{value:,}" if isinstance(value, int) else f"{value:.3f}"
        return written if facts.language == "en" else written.replace(",", "\u202f").replace(".", ",")

    def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
        lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
        return "\n".join(["| " + " | ".join(header) + " |", "|" + " --- |" * len(header), *lines])

    rows: dict[tuple[str, str], dict[str, str]] = {}
    for label, result in facts.results.items():
        for task, metrics in result.items():
            for metric, score in metrics.items():
                error = "" if score["stderr"] is None else f" ± {number(score['stderr'])}"
                cell = number(score["value"]) + error + (" †" if score.get("chat_template") else "")
                rows.setdefault((task, metric), {})[label] = cell
    keys = ("name", "licence", "documents", "bytes")
    metadata = ModelCardData(
        license=facts.license,
        language=list(facts.languages) or None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["affinage", "jax"] + (["conversational"] if facts.tuned else []),
    )
    card = ModelCard.from_template(
        metadata,
        template_path=str(_TEMPLATES / f"card.{facts.language}.md"),
        name=model.name,
        place=place,
        facts=facts,
        parameters=parameters(model.graph).total,
        context=model.context,
        opening=opening,
        chat=model.chat,
        score_rows=[[*names, *(cells.get(label, "–") for label in facts.results)] for names, cells in rows.items()],
        in_chat=any("†" in cell for cells in rows.values() for cell in cells.values()),
        sources=[[number(source.get(key, "")) for key in keys] for source in facts.sources],
        training=[[label, number(value)] for label, value in facts.training.items()],
        version=__version__,
        number=number,
        table=table,
    )
    return re.sub(r"\n{3,}", "\n\n", str(card)).rstrip() + "\n"


def write_adapter(folder: Path, adapters: Adapters, params: PyTree, *, base: str = "") -> dict[str, int]:
    """Write a folder that `peft.PeftModel.from_pretrained(model, folder)` puts beside the exported weights of the base.

    `params` are A and B. `base` is the base's repository or exported folder, by which PEFT finds it; "" if there is
    none yet. Returns {file: bytes}. Raises UserError for a GPT-2, whose matrices transformers stores together.
    """
    if family_of(adapters.graph) is FAMILIES["gpt2"]:
        fix = "Leave out --adapter: the exported weights have the adapters in them."
        raise UserError("PEFT adapts no single matrix of a GPT-2", fix=fix)
    tensors, settings = adapter_tensors(adapters, params), adapters.settings
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": settings.r,
        "lora_alpha": settings.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "adapter_config.json", config)
    _save(tensors, folder / "adapter_model.safetensors")
    return _sizes(folder)


def adapter_tensors(adapters: Adapters, params: PyTree) -> dict[str, NDArray[Any]]:
    """Return A [rank, inputs] and B [outputs, rank] under PEFT's names, float32."""
    tensors: dict[str, NDArray[Any]] = {}
    family, rank = family_of(adapters.graph), adapters.settings.r
    repeated = decoder_nodes(adapters.graph)["blocks"].repeat is not None
    for path in adapters.targets:
        leaves = reduce(getitem, path, params)
        module = family.tensors[".".join(("blocks", *path[1:], "kernel"))].removesuffix(".weight")
        a, b = (np.asarray(leaves[name], np.float32) for name in (LORA_A, LORA_B))
        for layer, (of_layer_a, of_layer_b) in enumerate(zip(a, b, strict=True) if repeated else [(a, b)]):
            place = "base_model.model." + module.format(layer=layer)
            tensors[f"{place}.lora_A.weight"] = np.ascontiguousarray(of_layer_a.reshape(-1, rank).T)
            tensors[f"{place}.lora_B.weight"] = np.ascontiguousarray(of_layer_b.reshape(rank, -1).T)
    return tensors
