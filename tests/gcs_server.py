"""A server of Google Cloud Storage's protocol in this process, on the loopback address."""

import contextlib
import os
import socket
from collections.abc import Callable, Iterator

# Else gcsfs asks Google, with the keys of an account, of what kind each bucket is: the server here has only the usual.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"

import fsspec
import pytest
from gcp_storage_emulator.server import create_server


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """Its address, as long as it serves."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server's, which may share the port
        held.bind(("127.0.0.1", 0))
        server = create_server("127.0.0.1", port := held.getsockname()[1], in_memory=True)
        server.start()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.stop()


def make_bucket(server: str, monkeypatch: pytest.MonkeyPatch, name: str) -> Callable[[str], str]:
    """Make a bucket that this process, and those it starts, reach by the environment alone; gives URLs in it."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server)
    fsspec.get_filesystem_class("gs").clear_instance_cache()
    fsspec.filesystem("gs").mkdir(name)
    return lambda path: f"gs://{name}/{path}"
