"""What is put at a URL can be read there again, byte for byte, whatever it holds."""

from pathlib import Path

import pytest

from affinage.checkpoint.remote import RemoteError, RemoteFolder
from affinage.checkpoint.remote_steps import RemoteSteps
from affinage.checkpoint.seal import SEAL, seal
from affinage.data.shards import open_url
from affinage.data.uploads import upload_file

# Two of these are the lines between which gcsfs puts what it sends.
ENDS = [b"", b"\r", b"\n", b"\r\n", b"\n\r", b"--", b"\r\r", b"\n--==0==--", b"\n--==0==\nmore", b"\r\n--==0==\r\n"]


def test_contents_arrive_as_they_are(google_bucket, bucket, tmp_path: Path):
    for url in (google_bucket("here"), bucket("here"), f"memory://{tmp_path.name}", f"file://{tmp_path}/there"):
        folder, file = RemoteFolder(url), tmp_path / "a file"
        for contents in (start + end for start in (b"", b"a text") for end in ENDS):
            folder.write("written", contents)
            file.write_bytes(contents)
            folder.put(file, "put")
            upload_file(*open_url(f"{url}/as rows are"), file)
            assert [folder.read(name) for name in ("written", "put", "as rows are")] == 3 * [contents], url


def test_a_step_of_which_a_server_kept_less_gets_no_seal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"what was saved")
    seal(tmp_path)
    write, steps = RemoteFolder.write, RemoteSteps(RemoteFolder(f"memory://{tmp_path.name}"))
    keeps_less = lambda self, name, data: write(self, name, data[:-1] if name == "b" else data)  # noqa: E731
    monkeypatch.setattr(RemoteFolder, "write", keeps_less)
    with pytest.raises(RemoteError, match=r"13 of the 14 bytes of .*3/b have arrived"):
        steps.bring(3, tmp_path, (tmp_path / SEAL).read_bytes(), lambda: None)
    assert steps.steps() == []
