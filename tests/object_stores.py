"""Servers of S3's and of Google Cloud Storage's protocols in this process, on the loopback address."""

import contextlib
import os
import socket
from collections.abc import Callable, Iterator

# Else gcsfs asks Google, with the keys of an account, of what kind each bucket is: the server here has only the usual.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"

import fsspec
import pytest
from gcp_storage_emulator.server import create_server

BUCKET = "a-bucket"


@contextlib.contextmanager
def bucket(kind: str, patch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """An empty bucket, `s3` or `gs`, that this process and those it starts reach by the environment; makes its URLs."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server's, which may share the port
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        if kind == "s3":
            from moto.server import ThreadedMotoServer

            server = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
            given = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
            given |= {"AWS_ACCESS_KEY_ID": "an-access-key-of-tests", "AWS_SECRET_ACCESS_KEY": "a-secret-key-of-tests"}
        else:
            server = create_server("127.0.0.1", port, in_memory=True)
            given = dict.fromkeys(("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL"), f"http://127.0.0.1:{port}")
            given["GOOGLE_AUTH_TOKEN_FOR_TESTING"] = "a-token"
        for name, value in given.items():
            patch.setenv(name, value)
        server.start()
        try:
            fsspec.get_filesystem_class(kind).clear_instance_cache()
            fsspec.filesystem(kind).mkdir(BUCKET)
            yield lambda path: f"{kind}://{BUCKET}/{path}"
        finally:
            server.stop()
