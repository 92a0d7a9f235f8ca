"""Bits per byte: a model's, and those of general compressors as the yardstick beside it."""

import lzma
import math
import zlib
from collections.abc import Iterable, Sequence

from affinage.evaluation.backend import JaxLM

SEPARATOR = b"\n"  # put between texts, so that the compressors too are told where one ends


def model_bits_per_byte(lm: JaxLM, texts: Sequence[str]) -> float:
    """Bits the model needs per UTF-8 byte of the texts, each in windows of its context, the ends of texts included."""
    total = sum(len(text.encode("utf-8")) for text in texts)
    if total == 0:
        raise ValueError("there is no text to score")
    return -sum(lm.rolling(texts, ended=True)) / math.log(2) / total


def compressor_bits_per_byte(texts: Iterable[str]) -> dict[str, float]:
    """What `gzip -9` and `xz -9` need for the texts, one after the other: {"gzip": ..., "xz": ...}, in bits per byte.

    The bytes counted are the texts' own in UTF-8, without separators, as for a model's bits per byte. The texts are
    compressed as one stream, so that the compressors may use what is common to them; a model is not shown the texts
    before. xz -9 needs about 700 MB of memory.
    """
    gzip = zlib.compressobj(9, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    xz = lzma.LZMACompressor(preset=9)
    total = gzip_bytes = xz_bytes = 0
    for text in texts:
        encoded = text.encode("utf-8")
        total += len(encoded)
        gzip_bytes += len(gzip.compress(encoded + SEPARATOR))
        xz_bytes += len(xz.compress(encoded + SEPARATOR))
    if total == 0:
        raise ValueError("there is no text to compress")
    gzip_bytes += len(gzip.flush())
    xz_bytes += len(xz.flush())
    return {"gzip": 8 * gzip_bytes / total, "xz": 8 * xz_bytes / total}
