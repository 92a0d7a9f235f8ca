"""Passwords of downloads."""

import http.server
import threading
from pathlib import Path

from affinage.data.downloads import cached


def test_a_download_takes_its_password_from_netrc_and_gives_it_to_no_other_server(tmp_path: Path, monkeypatch):
    seen: list[tuple[int, str | None]] = []

    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append((self.server.server_address[1], self.headers["Authorization"]))
            moved = self.path == "/moved"
            self.send_response(302 if moved else 200)
            if moved:
                self.send_header("Location", f"http://localhost:{other.server_address[1]}/x")
            self.send_header("Content-Length", "0" if moved else "2")
            self.end_headers()
            self.wfile.write(b"" if moved else b"ok")

        def log_message(self, *_: object) -> None:
            pass

    first, other = servers = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) for _ in range(2)]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login ada password lovelace\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("AFFINAGE_CACHE", str(tmp_path / "cache"))
    try:
        assert cached(f"http://127.0.0.1:{first.server_address[1]}/moved").read_bytes() == b"ok"
    finally:
        for server in servers:
            server.shutdown()
    assert seen == [(first.server_address[1], "Basic YWRhOmxvdmVsYWNl"), (other.server_address[1], None)]
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and b"lovelace" in path.read_bytes()]
