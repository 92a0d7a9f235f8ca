"""Bits per byte of general compressors, the yardstick beside a model's own."""

import lzma
import zlib
from collections.abc import Iterable

SEPARATOR = b"\n"  # put between texts, so that the compressors too are told where one ends


def compressor_bits_per_byte(texts: Iterable[str]) -> dict[str, float]:
    """What `gzip -9` and `xz -9` need for the texts, one after the other: {"gzip": ..., "xz": ...}, in bits per byte.

    The bytes counted are the texts' own in UTF-8, without separators, as for a model's bits per byte. The texts are
    compressed as one stream, so that the compressors may use what is common to them; a model is not shown the texts
    before. xz -9 needs about 700 MB of memory.
    """
    compressors = {
        "gzip": zlib.compressobj(9, zlib.DEFLATED, 16 + zlib.MAX_WBITS),
        "xz": lzma.LZMACompressor(preset=9),
    }
    compressed = dict.fromkeys(compressors, 0)
    total = 0
    for text in texts:
        encoded = text.encode("utf-8")
        total += len(encoded)
        for name, compressor in compressors.items():
            compressed[name] += len(compressor.compress(encoded)) + len(compressor.compress(SEPARATOR))
    if total == 0:
        raise ValueError("there is no text to compress")
    return {name: 8 * (size + len(compressors[name].flush())) / total for name, size in compressed.items()}
