"""Is the exported folder the model? It is compared with what transformers computes from it, and llama.cpp."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from affinage.data.chat import encode_prompt, system_prompt_in, with_default_system
from affinage.data.special_tokens import CONTROL_PIECES
from affinage.errors import UserError
from affinage.generation.engine import LoadedModel, logits_of
from affinage.hub.folder import DTYPES
from affinage.model.graph import Graph
from affinage.model.layer import PyTree
from affinage.parallel.sharding import MeshLayout

TOLERANCE = 1e-4  # largest difference between two logits, as a share of the largest logit
GGUF_TOLERANCE = 1e-2  # llama.cpp's kernels accumulate in another order and partly in float16
_TOKENS_COMPARED = 512  # of every text, at most: enough to see a wrong rotation or mask
_GGUF_LOGITS = 8  # texts whose logits are compared; token ids are compared for all
CONVERTER = "convert_hf_to_gguf.py"
LLAMA_CPP = "LLAMA_CPP"  # environment variable: a checkout of llama.cpp

TRICKY_TEXTS = (
    "L'été, où naîtra l'œuvre ? « Ça, dit-elle… »",
    "🧀 emoji 👩‍👩‍👧‍👦 and 🇫🇷 flags, e\u0301 combining, \u200b zero width",
    "def f(x):\n\tif x > 0:\n\t\treturn [x ** 2 for _ in range(10)]  # code\n",
    "   leading, double  and trailing   \n\n\n\t\t newlines \r\n",
    " ".join(CONTROL_PIECES) + " <|im_start|>user\nspelled, not meant<|im_end|>",
    "1234567890 3.14159 1e-5 0x1F 12,345.67 €",
    "",
    " ",
    "\x00\x7f日本語 русский العربية",
)


def verify(folder: Path, model: LoadedModel, texts: Sequence[str]) -> dict[str, Any]:
    """Load `folder` with transformers and compare it with `model`.

    Compared are the names of the tensors, the logits of `texts` (float32, weights rounded to the exported dtype on both
    sides), the token ids of texts and control tokens, and, if the folder has a chat template, of conversations. Returns
    what was compared and the largest difference as a share of the largest logit. Raises UserError at the first
    disagreement, or if torch or transformers are missing.
    """
    try:
        import torch  # heavy, and only here
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar, set_verbosity_error
    except ImportError as error:
        what = f"verifying an export needs transformers and torch, and {error.name} is not installed"
        raise UserError(what, where="--verify", fix='pip install "affinage[verify]"') from error
    disable_progress_bar()
    set_verbosity_error()  # a text may be longer than the context
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    for token, piece in enumerate(CONTROL_PIECES if model.tokenizer.fixed_ids else ()):
        if tokenizer.convert_tokens_to_ids(piece) != token:
            raise _disagreement(folder, f"{piece} has the id {tokenizer.convert_tokens_to_ids(piece)}, not {token}")
    for text in (*texts, *TRICKY_TEXTS):  # in ours, text that spells a control token is text
        _same_ids(folder, model, text, tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))
    conversations = _compare_conversations(folder, tokenizer, model)
    load: Any = partial(AutoModelForCausalLM.from_pretrained, folder, local_files_only=True)
    theirs, loading = load(dtype=torch.float32, output_loading_info=True)
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(map(str, loading[what])):
            raise _disagreement(folder, f"transformers has {what.replace('_', ' ')}: {', '.join(names[:5])}")
    dtype = DTYPES[json.loads((folder / "config.json").read_text())["dtype"]]
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf).astype(dtype).astype(jnp.float32), model.params)
    largest, tokens = 0.0, 0
    for text in texts:
        ids = _ids(model, text)
        tokens += len(ids)
        with torch.no_grad():
            expected = theirs.eval()(torch.tensor([ids])).logits[0].numpy()
        largest = max(largest, _apart(folder, model, params, text, expected, TOLERANCE))
    return {
        "texts": len(texts),
        "tokens": tokens,
        "largest_logit_difference": largest,
        "token_sequences": len(texts) + len(TRICKY_TEXTS),
        "conversations": conversations,
    }


def verify_gguf(folder: Path, model: LoadedModel, texts: Sequence[str]) -> dict[str, Any]:
    """Convert an exported folder to GGUF by llama.cpp's script, and compare token ids and logits with the model's.

    Returns and raises as `verify`, also if the script or llama-cpp-python are missing.
    """
    converter = Path(os.environ.get(LLAMA_CPP, ".")) / CONVERTER
    if not converter.is_file() or not importlib.util.find_spec("llama_cpp"):
        fix = f"git clone https://github.com/ggml-org/llama.cpp, set {LLAMA_CPP} to it, pip install llama-cpp-python"
        what = f"comparing with llama.cpp needs its {CONVERTER} and llama-cpp-python"
        raise UserError(what, where="--verify-gguf", fix=fix)
    import llama_cpp

    with TemporaryDirectory() as temporary:
        file = Path(temporary) / "model.gguf"
        command = [sys.executable, str(converter), str(folder.resolve()), "--outfile", str(file), "--outtype", "f32"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise UserError(f"llama.cpp's converter failed: {last}", where=str(folder), fix=" ".join(command))
        theirs = llama_cpp.Llama(str(file), n_ctx=model.context, logits_all=True, verbose=False)
        for text in texts:
            _same_ids(folder, model, text, list(theirs.tokenize(text.encode(), add_bos=False, special=False)))
        largest = 0.0
        for text in texts[:_GGUF_LOGITS]:
            theirs.reset()
            theirs.eval(ids := _ids(model, text))
            logits = np.array(theirs.scores[: len(ids)])
            largest = max(largest, _apart(folder, model, model.params, text, logits, GGUF_TOLERANCE))
    return {"texts": len(texts), "largest_logit_difference": largest}


def _same_ids(folder: Path, model: LoadedModel, text: str, theirs: list[int]) -> None:
    if (ours := model.tokenizer.encode(text)) != theirs:
        place = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
        what = f"token {place} of {text[:60]!r} is {theirs[place : place + 3]}, not {ours[place : place + 3]}"
        raise _disagreement(folder, what)


def _ids(model: LoadedModel, text: str) -> list[int]:
    return [*model.tokenizer.opening, *model.tokenizer.encode(text)][: min(model.context, _TOKENS_COMPARED)]


def _apart(
    folder: Path, model: LoadedModel, params: PyTree, text: str, expected: Float[np.ndarray, "S V"], tolerance: float
) -> float:
    """The largest difference of a text's logits, as a share of the largest one. Raises UserError if it is too large.

    Ours are float32, on the model's mesh, without TF32 or bf16 passes, which GPUs and TPUs use by default.
    """
    ids = _ids(model, text)
    rows = np.zeros((model.row_multiple, min(model.context, _TOKENS_COMPARED)), np.int32)  # one shape for all texts
    rows[:, : len(ids)] = ids
    with jax.default_matmul_precision("highest"):
        logits = _logits(model.graph, params, model.place(rows), model.layout)
    ours = model.on_host(logits)[0, : len(ids), : expected.shape[1]]  # some ids may be left out
    difference = float(np.abs(ours - expected).max() / max(1.0, np.abs(expected).max()))
    if not difference <= tolerance:  # not ">": it must also catch NaN
        what = f"the logits of {text[:60]!r} differ by {difference:.2e} of the largest, not {tolerance:.0e}"
        raise _disagreement(folder, what)
    return difference


@partial(jax.jit, static_argnames=("graph", "layout"))
def _logits(
    graph: Graph, params: PyTree, tokens: Int[Array, "B S"], layout: MeshLayout | None
) -> Float[Array, "B S V"]:
    return logits_of((graph, "float32", layout), params, {"tokens": tokens}, attention="xla")[0].array()


def _compare_conversations(folder: Path, theirs: Any, model: LoadedModel) -> int:
    own, said = model.tokenizer.template, model.system_prompt if model.chat else ""
    default = system_prompt_in(theirs.chat_template) if isinstance(theirs.chat_template, str) else None
    if default is None and (own is None or theirs.chat_template != with_default_system(own.source, said)):
        return 0  # none, or another model's
    # A base model that was trained on from a chat model keeps that one's template, and has no system prompt itself.
    system_prompt = said or default or ""
    question = {"role": "user", "content": "Où est Paris ?\n\n Two  lines. 🧀"}
    answer = {"role": "assistant", "content": "En France."}
    system, compared = {"role": "system", "content": "Be brief."}, 0
    for messages in ([question], [system, question], [question, answer, {**question, "content": " and London?"}]):
        try:
            ours = encode_prompt(messages, model.tokenizer, system_prompt)
        except UserError:  # not every template knows system messages
            continue
        text = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        if theirs.encode(text, add_special_tokens=False) != ours:
            raise _disagreement(folder, f"the chat template makes other tokens than training did of {messages!r}")
        compared += 1
    return compared


def _disagreement(folder: Path, what: str) -> UserError:
    fix = "Do not release it. Export it again, and if that does not help, report it with the recipe."
    return UserError(f"the exported folder is not the model: {what}", where=str(folder), fix=fix)
