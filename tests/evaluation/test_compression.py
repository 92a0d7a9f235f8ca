"""Bits per byte of the compressors against the command line tools on the same bytes."""

import shutil
import subprocess

import pytest

from affinage.evaluation.compression import compressor_bits_per_byte


@pytest.mark.parametrize("tool", ["gzip", "xz"])
def test_the_figures_are_those_of_the_command_line_tools(tool, tmp_path):
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    texts = [f"La ville numéro {number} a {number * 7} habitants." for number in range(500)]
    content = ("\n".join(texts) + "\n").encode()
    file = tmp_path / "text"
    file.write_bytes(content)
    flags = ["-9", "-c"] + (["-n"] if tool == "gzip" else [])
    expected = len(subprocess.run([tool, *flags, str(file)], capture_output=True, check=True).stdout)
    bytes_of_text = sum(len(text.encode()) for text in texts)
    measured = compressor_bits_per_byte(texts)[tool] * bytes_of_text / 8
    assert measured == pytest.approx(expected, rel=0.02)


def test_no_text_is_refused():
    with pytest.raises(ValueError, match="no text"):
        compressor_bits_per_byte([])
