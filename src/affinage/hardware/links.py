"""Connections between hosts that end when a host does, however it ended: so the others know at once."""

import contextlib
import hmac
import json
import secrets
import selectors
import socket
import threading
from collections.abc import Callable
from typing import Any

from affinage.hardware.hosts import HostLost, Hosts

_KEY = "affinage/links"
_CONNECT = 30.0  # seconds for the first host to answer; where its port cannot be reached, it goes without
_LOOK_EVERY = 0.5  # seconds
_ALIVE_EVERY = 60  # seconds of silence after which the kernels ask each other, so that nothing between them forgets
_GOODBYE = b"bye\n"
_MISTAKE = "mistake"
_LINE = 256  # bytes, at most


class Links:
    """A connection from every host to the first one. A host whose connection ends without a goodbye is gone.

    The kernel ends the connections of a process that is killed, while JAX's heartbeats take 45 s to be missed. A
    machine that loses its power says nothing, and is left to these; so is a host that cannot connect to the first.
    Whoever connects must know a token, which JAX's coordinator hands out.

    Args:
        hosts: of the run.
        address: of the first host, as the others know it.
        listens_on: its own address, where that is another one inside.
        lost: called in a thread with the number of a host that is gone, and whether it is so because it has found a
            mistake of the user, of which it tells.
    """

    def __init__(self, hosts: Hosts, address: str, listens_on: str, lost: Callable[[int, bool], None]) -> None:
        self._hosts, self._address, self._listens_on, self._lost = hosts, address, listens_on, lost
        self._ended = threading.Event()
        self._left: set[int] = set()
        self._links: dict[int, socket.socket] = {}
        if hosts.count > 1:
            work = self._serve if hosts.first else self._connect
            threading.Thread(target=work, name="links", daemon=True).start()

    def say_goodbye(self, *, mistake: bool = False) -> None:
        """Before this host leaves in good order, so that nobody takes it for gone; or for a mistake that it tells."""
        self._ended.set()
        for link in list(self._links.values()):
            with contextlib.suppress(OSError):
                link.send(_line(self._hosts.index, mistake) if mistake else _GOODBYE)

    def _connect(self) -> None:
        try:
            said = json.loads(self._hosts.hear(_KEY, _CONNECT, said="host 0 has not said where it listens"))
            link = socket.create_connection((self._address, said["port"]), _CONNECT)
            link.settimeout(None)
            _keep_alive(link)
            self._links[0] = link
            link.sendall(f"{said['token']} {self._hosts.index}\n".encode())
            with link.makefile("rb") as lines:
                while line := lines.readline(_LINE):
                    if line == _GOODBYE:
                        return
                    self._gone(*_read(line))
        except ConnectionResetError:
            pass
        except (OSError, HostLost, ValueError):
            return
        self._gone(0)

    def _serve(self) -> None:
        try:
            family = socket.getaddrinfo(self._listens_on, 0, type=socket.SOCK_STREAM)[0][0]
            server = socket.create_server((self._listens_on, 0), family=family, backlog=self._hosts.count)
            token = secrets.token_hex(16)
            self._hosts.tell(_KEY, json.dumps({"port": server.getsockname()[1], "token": token}))
        except (OSError, HostLost):
            return
        with server, selectors.DefaultSelector() as selector:
            selector.register(server, selectors.EVENT_READ)
            while not self._ended.is_set():
                for key, _ in selector.select(_LOOK_EVERY):
                    if key.fileobj is server:
                        link, _ = server.accept()
                        _keep_alive(link)
                        selector.register(link, selectors.EVENT_READ, None)
                    else:
                        self._hear(selector, key, token)

    def _hear(self, selector: selectors.BaseSelector, key: selectors.SelectorKey, token: str) -> None:
        link: Any = key.fileobj
        host: int | None = key.data
        try:
            said = link.recv(_LINE)
        except ConnectionResetError:
            said = b""
        except OSError:  # the machine or the network does not answer, which may pass
            selector.unregister(link)
            return
        if said == _GOODBYE and host is not None:
            self._left.add(host)
        elif host is not None and said == _line(host, mistake=True):
            self._gone(host, mistake=True)
        elif said and host is None and (host := self._known(said, token)) is not None:
            self._links[host] = link
            selector.modify(link, selectors.EVENT_READ, host)
        else:
            selector.unregister(link)
            link.close()
            if host is not None:
                self._gone(host)

    def _known(self, said: bytes, token: str) -> int | None:
        """The number of a host that knows the token; None for anybody else."""
        word, _, number = said.partition(b" ")
        if not hmac.compare_digest(word, token.encode()) or not number.strip().isdigit():
            return None
        host = int(number)
        return host if 0 < host < self._hosts.count and host not in self._links else None

    def _gone(self, host: int, mistake: bool = False) -> None:
        if self._ended.is_set() or host in self._left:
            return
        self._left.add(host)
        for other in set(self._links) - self._left if self._hosts.first else ():
            with contextlib.suppress(OSError):
                self._links[other].send(_line(host, mistake))
        threading.Thread(target=self._lost, args=(host, mistake), daemon=True).start()


def _line(host: int, mistake: bool) -> bytes:
    return f"{host} {_MISTAKE if mistake else ''}\n".encode()


def _read(line: bytes) -> tuple[int, bool]:
    number, _, why = line.decode().partition(" ")
    return int(number), why.strip() == _MISTAKE


def _keep_alive(link: socket.socket) -> None:
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _ALIVE_EVERY)
