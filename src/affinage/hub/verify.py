"""Is the exported folder the model? transformers itself is compared."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from affinage.data.chat import encode_prompt, system_prompt_in, with_system_prompt
from affinage.data.special_tokens import CONTROL_PIECES
from affinage.errors import UserError
from affinage.generation.model import LoadedModel, logits_of
from affinage.hub.export import DTYPES
from affinage.model.graph import Graph
from affinage.model.parameter import PyTree
from affinage.parallel import MeshLayout

TOLERANCE = 1e-4  # largest difference between two logits, as a share of the largest logit
_TOKENS_COMPARED = 512  # of every text, at most: enough to see a wrong rotation or mask

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
    sides), the token ids of `texts` and of texts that are hard to tokenize, the ids of the control tokens, and, if the
    folder has a chat template, the ids of conversations. Returns what was compared and the largest difference as a
    share of the largest logit. Raises UserError at the first disagreement, or if torch or transformers are missing.
    """
    try:
        import torch  # heavy, and only here
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise UserError(
            f"verifying an export needs transformers and torch, and {error.name} is not installed",
            where="export.verify",
            fix='pip install "affinage[verify]"',
        ) from error
    theirs_tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    compared = _compare_tokens(folder, theirs_tokenizer, model, [*texts, *TRICKY_TEXTS])
    conversations = _compare_conversations(folder, theirs_tokenizer, model)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, dtype=torch.float32, output_loading_info=True
    )
    theirs, loading = loaded
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(map(str, loading[what])):
            raise _disagreement(folder, f"transformers has {what.replace('_', ' ')}: {', '.join(names[:5])}")
    largest, tokens = 0.0, 0
    params = _rounded(model.params, json.loads((folder / "config.json").read_text())["dtype"])
    for text in texts:
        ids = [*model.tokenizer.opening, *model.tokenizer.encode(text)][: min(model.context, _TOKENS_COMPARED)]
        tokens += len(ids)
        with torch.no_grad():
            expected = theirs.eval()(torch.tensor([ids])).logits[0].numpy()
        found = logits_at_highest_precision(model, params, ids)[:, : expected.shape[1]]  # some ids may be left out
        difference = float(np.abs(found - expected).max() / max(1.0, np.abs(expected).max()))
        largest = max(largest, difference)
        if not difference <= TOLERANCE:  # not ">": it must also catch NaN
            what = f"the logits of {text[:60]!r} differ by {difference:.2e} of the largest, not {TOLERANCE:.0e}"
            raise _disagreement(folder, what)
    return {
        "texts": len(texts),
        "tokens": tokens,
        "largest_logit_difference": largest,
        "token_sequences": compared,
        "conversations": conversations,
    }


def logits_at_highest_precision(model: LoadedModel, params: PyTree, ids: Sequence[int]) -> Float[np.ndarray, "S V"]:
    """float32 logits of a text on the model's mesh; without TF32 or bf16 passes, which GPUs and TPUs use by default."""
    rows = np.zeros((model.row_multiple, min(model.context, _TOKENS_COMPARED)), np.int32)  # one shape for all texts
    rows[:, : len(ids)] = ids
    with jax.default_matmul_precision("highest"):
        logits = _logits(model.graph, params, model.place(rows), model.layout)
    return model.on_host(logits)[0, : len(ids)]


@partial(jax.jit, static_argnames=("graph", "layout"))
def _logits(
    graph: Graph, params: PyTree, tokens: Int[Array, "B S"], layout: MeshLayout | None
) -> Float[Array, "B S V"]:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return logits_of(graph, params, tokens, positions, "float32", attention="xla", layout=layout)[0].array()


def _rounded(params: PyTree, dtype: str) -> PyTree:
    """The weights as the export holds them, in float32, where they are."""
    rounded: PyTree = jax.tree.map(lambda leaf: jnp.asarray(leaf).astype(DTYPES[dtype]).astype(jnp.float32), params)
    return rounded


def _compare_tokens(folder: Path, theirs: Any, model: LoadedModel, texts: Sequence[str]) -> int:
    for token, piece in enumerate(CONTROL_PIECES if model.tokenizer.fixed_ids else ()):
        if theirs.convert_tokens_to_ids(piece) != token:
            raise _disagreement(folder, f"{piece} has the id {theirs.convert_tokens_to_ids(piece)}, not {token}")
    for text in texts:
        ours = model.tokenizer.encode(text)
        # Text that spells a control token is text: transformers must be told so.
        ids = theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
        if ids != ours:
            at = next((i for i, (a, b) in enumerate(zip(ours, ids)) if a != b), min(len(ours), len(ids)))
            raise _disagreement(folder, f"token {at} of {text[:60]!r} is {ids[at : at + 3]}, not {ours[at : at + 3]}")
    return len(texts)


def _compare_conversations(folder: Path, theirs: Any, model: LoadedModel) -> int:
    own = model.tokenizer.template
    default = system_prompt_in(theirs.chat_template) if isinstance(theirs.chat_template, str) else None
    if default is None and (own is None or theirs.chat_template != own.source):
        return 0  # none, or another model's
    # A base model that was trained on from a chat model keeps that one's template, and has no system prompt itself.
    system_prompt = model.system_prompt or default or ""
    question = {"role": "user", "content": "Où est Paris ?\n\n Two  lines. 🧀"}
    answer = {"role": "assistant", "content": "En France."}
    conversations = [
        [question],
        [{"role": "system", "content": "Be brief."}, question],
        [question, answer, {"role": "user", "content": " and London?"}],
    ]
    compared = 0
    for messages in conversations:
        try:
            ours = encode_prompt(messages, model.tokenizer, system_prompt)
        except UserError:  # not every template knows system messages
            continue
        told = messages if own is None else with_system_prompt(messages, system_prompt)
        text = theirs.apply_chat_template(told, add_generation_prompt=True, tokenize=False)
        if theirs.encode(text, add_special_tokens=False) != ours:
            raise _disagreement(folder, f"the chat template makes other tokens than training did of {messages!r}")
        compared += 1
    return compared


def _disagreement(folder: Path, what: str) -> UserError:
    return UserError(
        f"the exported folder is not the model: {what}",
        where=str(folder),
        fix="do not release it; export it again, and if that does not help, report it with the recipe",
    )
