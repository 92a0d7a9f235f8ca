"""Addresses are masked where they are addresses, and nothing else changes."""

import ipaddress
from collections import Counter

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from affinage.data.mask import EMAIL, IPV4, IPV6, mask, mask_one

NOBODY, NOBODYS_V4, NOBODYS_V6 = EMAIL, IPV4, IPV6


def masked(text: str) -> str:
    return mask(pa.array([text]))[0][0].as_py()


ADDRESSES = {
    "Write to jean.dupont+liste@univ-paris.fr, please.": f"Write to {NOBODY}, please.",
    "<mailto:a@b.example.co.uk>": f"<mailto:{NOBODY}>",
    "Écrire à élodie@café.fr.": f"Écrire à {NOBODY}.",
    "The server 8.8.8.8 answered.": f"The server {NOBODYS_V4} answered.",
    "at 91.121.4.7:8080": f"at {NOBODYS_V4}:8080",
    "at 2a01:e0a:1::42, fine": f"at {NOBODYS_V6}, fine",
    "conversion 1.2.3.4, in 8.8.8.8": f"conversion {NOBODYS_V4}, in {NOBODYS_V4}",
    "at [2606:4700:4700:0:0:0:0:1111]": f"at [{NOBODYS_V6}]",
}
NO_PUBLIC_ADDRESSES = [
    "a @ b, 3@2, @home, user@localhost, user@@example.com",
    "version 1.2.3.4.5, 999.1.1.1, 1.2.3, section 4.1.2.",
    "version 1.2.3.4, Versions 8.8.4.4, v1.2.3.4, v. 1.2.3.4, release 1.2.3.4, firmware: 1.2.3.4",
    "la version 1.2.3.4, la révision 8.8.8.8, la mise à jour 9.9.9.9",
    "127.0.0.1, 10.0.0.1, 192.168.1.1 and ::1 and fe80::1 are private",
    "at 12:30:45 on 10:20; std::vector a::b; 0.0.0.0 and ::",
]


def test_addresses_are_replaced_and_nothing_else():
    for text, expected in ADDRESSES.items():
        assert masked(text) == expected and masked(expected) == expected
    for text in NO_PUBLIC_ADDRESSES:
        assert masked(text) == text


def test_kinds_are_counted():
    text = "8.8.8.8 9.9.9.9 10.0.0.1 2a01::1"
    out, rows, counts = mask(pa.array(["", text, "nothing", text]))
    assert out.to_pylist()[1] == f"{NOBODYS_V4} {NOBODYS_V4} 10.0.0.1 {NOBODYS_V6}"
    assert rows.tolist() == [1, 3] and counts == {"IPv4": 4, "IPv6": 2}


@given(st.lists(st.text(st.sampled_from("ab1f9.:@ é-\n2"), max_size=40), min_size=1, max_size=5))
def test_the_prefilter_misses_nothing(texts):
    out, _, counts = mask(pa.array(texts))
    expected: Counter[str] = Counter()
    assert out.to_pylist() == [mask_one(text, expected) for text in texts]
    assert counts == expected


@given(st.ip_addresses())
def test_every_public_address_is_found(address):
    text = f"from {address} on"
    public = address.is_global and (address.version == 4 or address in ipaddress.ip_network("2000::/3"))
    assert (masked(text) != text) == public


def test_a_long_line_of_signs_takes_no_time():
    for text in ("a" * 200_000 + "@", "1." * 100_000, "a:" * 100_000, "a@" * 100_000, "a." * 100_000 + "@b"):
        masked(text)
