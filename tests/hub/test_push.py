"""Uploading an export, to a stand-in for the hub that listens on this machine."""

import errno

import huggingface_hub
import pytest

import hub_server
from affinage.cli.program import main
from affinage.errors import UserError
from affinage.hub import repository
from affinage.hub.card import CardFacts
from affinage.hub.export import export
from affinage.hub.repository import local_copy, push
from tiny_models import tiny_llama

TOKEN = "hf_of_the_test"


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with hub_server.serving() as server:
        server.tokens = {TOKEN}
        yield server


def test_a_release_is_pushed_after_a_run_that_needed_no_network(hub, tmp_path, monkeypatch):
    export(tiny_llama(), tmp_path / "model", facts=CardFacts("mit"), chat=True)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.address)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # as it was loaded
    monkeypatch.delenv("HF_HUB_OFFLINE")  # as the user has it
    with pytest.raises(SystemExit) as ended:
        main(["export", str(tmp_path / "model"), "--to", str(tmp_path / "out"), "--push", "me/model"])
    assert not ended.value.code
    _, files = hub.repositories["models/me/model"].files("main")
    assert files["model.safetensors"] == (tmp_path / "out" / "model.safetensors").read_bytes()


def test_without_a_network_it_is_said_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(UserError) as caught:
        push(tmp_path, "me/model", endpoint="http://127.0.0.1:9")
    assert TOKEN not in str(caught.value) and "hf upload me/model" in caught.value.fix
    for missing in ("me/there-is-no-such-model", "./nowhere"):
        with pytest.raises(UserError, match=missing) as caught:
            local_copy(missing)
        assert caught.value.fix


def test_a_full_disk_is_not_the_hubs(monkeypatch: pytest.MonkeyPatch):
    def full(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(repository, "snapshot_download", full)
    with pytest.raises(OSError, match="No space left"):
        repository.local_copy("some/model")
