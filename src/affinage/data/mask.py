"""Personal data out of texts: e-mail and IP addresses become addresses that are nobody's."""

import ipaddress
import re
from collections import Counter
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from affinage.data.code_points import text_buffers
from affinage.data.compiled import kernel

# What stands in their place is nobody's: a domain and addresses that are kept for documentation (RFC 2606, 5737, 3849).
EMAIL, IPV4, IPV6 = "email@example.com", "192.0.2.1", "2001:db8::1"
_EMAIL_BIT, _IPV4_BIT, _IPV6_BIT = 1, 2, 4
# The local part and domain that people write (RFC 5322 without quoted strings and comments).
_EMAIL = re.compile(
    r"(?<![\w.!#$%&'*+/=?^`{|}~-])[\w.!#$%&'*+/=?^`{|}~-]{1,64}@(?:[\w](?:[\w-]{0,61}[\w])?\.){1,8}[^\W\d_][\w-]{0,22}[^\W_]"
    r"(?![\w@])"
)
_IPV4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w]|\.\d)")
# Four numbers after such a word are a version, though they may be an address in form.
_VERSION = re.compile(
    r"\b(?:versions?|release|build|firmware|ver|v|rev|r[ée]vision|mise à jour)[.:]? ?$", re.IGNORECASE
)
_IPV6 = re.compile(r"(?<![\w:.])[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){2,7}(?![\w:]|\.\d)")
_WORD_BEFORE = 16  # characters, in which the longest of those words fits
_HANDED_OUT = ipaddress.ip_network("2000::/3")


@kernel
def _suspects(data: np.ndarray, offsets: np.ndarray, kinds: np.ndarray) -> None:
    """Bits of the kinds of address that a text may hold: by an @ in a word, three dots after digits, or two colons."""
    for text in range(offsets.size - 1):
        start, end = np.int64(offsets[text]), np.int64(offsets[text + 1])
        dots, colons, found = 0, 0, 0
        digit = False
        for i in range(start, end):
            byte = data[i]
            if byte >= 0x30 and byte <= 0x39:
                digit = True
                continue
            if byte == 0x2E:
                dots = dots + 1 if digit else 0
                found |= _IPV4_BIT * (dots >= 3)
                digit = False
                continue
            dots, digit = 0, False
            if byte == 0x3A:
                colons += 1
                found |= _IPV6_BIT * (colons >= 2)
            elif not ((byte >= 0x41 and byte <= 0x46) or (byte >= 0x61 and byte <= 0x66)):
                colons = 0
                if byte == 0x40 and i > start and i + 1 < end and data[i - 1] > 0x20 and data[i + 1] > 0x20:
                    found |= _EMAIL_BIT
        kinds[text] = found


def mask(text: pa.Array) -> tuple[pa.Array, np.ndarray, Counter[str]]:
    """Replace the addresses in a batch of texts.

    An address of IPv4 or IPv6 counts if `ipaddress` parses it and calls it global, and of IPv6
    only what is handed out to anybody today (2000::/3; a::b is more often C++). Times such as 12:30:45 and
    version numbers such as 1.2.3.4.5 stay, and those of four parts after a word for them, such as v or version.

    Returns:
        The texts, the rows that changed (int64), and how many addresses of each kind were replaced.
    """
    data, offsets = text_buffers(text)
    kinds = np.zeros(len(text), np.uint8)
    _suspects(data, offsets, kinds)
    rows, masked = [], []
    counts: Counter[str] = Counter()
    suspects = np.flatnonzero(kinds)
    for row, before in zip(suspects.tolist(), text.take(pa.array(suspects)).to_pylist()):
        after = mask_one(before, counts)
        if after != before:
            rows.append(row)
            masked.append(after)
    changed = np.zeros(len(text), bool)
    changed[rows] = True
    out = pc.replace_with_mask(text, changed, pa.array(masked, pa.string())) if rows else text
    return out, np.flatnonzero(changed), counts


def mask_one(text: str, counts: Counter[str]) -> str:
    """The text with its addresses replaced; adds to `counts` what was."""

    def replaced(kind: str, by: str, holds: Callable[[str], bool] = lambda _: True) -> Callable[[re.Match[str]], str]:
        def replace(match: re.Match[str]) -> str:
            found = match.group()
            if found == by or not holds(found):
                return found
            if kind == "IPv4" and _VERSION.search(match.string, max(0, match.start() - _WORD_BEFORE), match.start()):
                return found
            counts[kind] += 1
            return by

        return replace

    def address(found: str) -> bool:
        try:
            parsed = ipaddress.ip_address(found)
        except ValueError:
            return False
        return parsed.is_global and (parsed.version == 4 or parsed in _HANDED_OUT)

    text = _EMAIL.sub(replaced("e-mail", EMAIL), text)
    text = _IPV4.sub(replaced("IPv4", IPV4, address), text)
    return _IPV6.sub(replaced("IPv6", IPV6, address), text)
