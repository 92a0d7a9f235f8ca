"""Secrets reach neither messages nor anything that is kept."""

import pytest

from affinage.config.load import load_recipe
from affinage.errors import UserError
from affinage.secrets import masked


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ("cannot read https://ada:lovelace@host.org/x.parquet", "cannot read https://***@host.org/x.parquet"),
        ("GET https://b.org/f?X-Amz-Signature=0a1b&part=2", "GET https://b.org/f?X-Amz-Signature=***&part=2"),
        ("no access with hf_abcdefghijklmnopqrstuvwxyz", "no access with ***"),
        ("401 {'Authorization': 'Bearer abcdefgh'}", "401 {'Authorization': 'Bearer ***'}"),
        ("the key of the map, tokens=3 and s3://bucket/key/x", "the key of the map, tokens=3 and s3://bucket/key/x"),
    ],
)
def test_what_is_a_secret_is_masked_and_nothing_else(said: str, wanted: str):
    assert masked(said) == wanted == str(UserError(said))


def test_values_of_the_environment_are_masked_wherever_they_stand(monkeypatch: pytest.MonkeyPatch):
    for name in ("WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, f"of {name.lower()}")
        assert masked(f"<of {name.lower()}>") == "<***>"
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/home/ada/key.json")  # a file, whose name is none
    assert masked("/home/ada/key.json is not there") == "/home/ada/key.json is not there"


@pytest.mark.parametrize(
    "override",
    [
        "data.sources=['https://b.org/f.parquet?token=0a1b']",
        "data.sources=[{path: 'http://0a1b@127.0.0.1:8899/x.jsonl'}]",
        "runtime.trackers.mlflow={uri: 'http://u:p0a1b@127.0.0.1:5000'}",
        "description=hf_abcdefghijklmnopqrstuvwxyz",
    ],
)
def test_a_recipe_with_a_secret_is_refused_without_repeating_it(override: str):
    with pytest.raises(UserError) as refused:
        load_recipe("quickstart", [override])
    message = str(refused.value)
    assert message.startswith(f"--set {override.partition('=')[0]}") and refused.value.fix
    assert not [secret for secret in ("0a1b", "hf_abc") if secret in message]
