"""A server of S3's protocol in this process, on the loopback address."""

import contextlib
from collections.abc import Callable, Iterator

import fsspec
import pytest
from moto.server import ThreadedMotoServer

ACCESS_KEY, SECRET_KEY = "an-access-key-of-tests", "a-secret-key-of-tests"


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """Its address, as long as it serves."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()


def make_bucket(server: str, monkeypatch: pytest.MonkeyPatch, name: str) -> Callable[[str], str]:
    """Make a bucket that this process, and those it starts, reach by the environment alone; gives URLs in it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    fsspec.filesystem("s3").mkdir(name)
    return lambda path: f"s3://{name}/{path}"
