"""Does llama.cpp compute the exported model? Its own converter and its Python bindings are compared with ours."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from affinage.errors import UserError
from affinage.generation.model import LoadedModel
from affinage.hub.verify import logits_at_highest_precision

CONVERTER = "convert_hf_to_gguf.py"
FOLDER = "LLAMA_CPP"  # environment variable: a checkout of llama.cpp
TOLERANCE = 1e-2  # of the largest logit; llama.cpp's kernels accumulate in another order and partly in float16
_LOGITS_OF = 8  # texts; the ids are compared of all


def verify_gguf(folder: Path, model: LoadedModel, texts: Sequence[str]) -> dict[str, Any]:
    """Convert an exported folder to GGUF and compare token ids and logits with the model's.

    Returns the number of texts and the largest difference as a share of the largest logit. Raises UserError at the
    first disagreement, or if the converter or llama-cpp-python are missing.
    """
    converter = _converter()
    try:
        import llama_cpp
    except ImportError as error:
        fix = "pip install llama-cpp-python"
        raise UserError("comparing with llama.cpp needs llama-cpp-python", where="--verify-gguf", fix=fix) from error
    with TemporaryDirectory() as temporary:
        file = Path(temporary) / "model.gguf"
        command = [sys.executable, str(converter), str(folder.resolve()), "--outfile", str(file), "--outtype", "f32"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise UserError(f"llama.cpp's converter failed: {last}", where=str(folder), fix=" ".join(command))
        theirs = llama_cpp.Llama(str(file), n_ctx=model.context, logits_all=True, verbose=False)
        return _compared(folder, model, theirs, texts)


def _converter() -> Path:
    """llama.cpp's script, in the checkout that the environment names or on the path."""
    named = os.environ.get(FOLDER)
    found = Path(named) / CONVERTER if named else Path(shutil.which(CONVERTER) or "")
    if not found.is_file():
        fix = f"git clone https://github.com/ggml-org/llama.cpp, and set {FOLDER} to that folder."
        raise UserError(f"llama.cpp's {CONVERTER} is not here", where="--verify-gguf", fix=fix)
    return found


def _compared(folder: Path, model: LoadedModel, theirs: Any, texts: Sequence[str]) -> dict[str, Any]:
    fix = "Do not release it as GGUF; report it with the recipe."
    for text in texts:
        expected = model.tokenizer.encode(text)
        found = theirs.tokenize(text.encode(), add_bos=False, special=False)
        if list(found) != expected:
            what = f"llama.cpp encodes {text[:60]!r} as {found[:8]}, not {expected[:8]}"
            raise UserError(what, where=str(folder), fix=fix)
    largest = 0.0
    for text in texts[:_LOGITS_OF]:
        ids = [*model.tokenizer.opening, *model.tokenizer.encode(text)][: min(model.context, 512)]
        theirs.reset()
        theirs.eval(ids)
        logits = logits_at_highest_precision(model, model.params, ids)
        apart = np.abs(np.array(theirs.scores[: len(ids)]) - logits).max()
        largest = max(largest, float(apart / max(1.0, np.abs(logits).max())))
        if not largest <= TOLERANCE:
            what = f"llama.cpp's logits of {text[:60]!r} differ by {largest:.2e} of the largest, not {TOLERANCE:.0e}"
            raise UserError(what, where=str(folder), fix=fix)
    return {"texts": len(texts), "largest_logit_difference": largest}
