"""Connections between hosts that end when a host does, or are silent when its machine is: so the others soon know."""

import contextlib
import hmac
import json
import resource
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from affinage.hardware.hosts import HostLost, Hosts
from affinage.hardware.silence import KNOWN, LOOK_EVERY, PATIENCE, Ear, ask_often, forget

_KEY = "affinage/links"
_CONNECT = 30.0  # seconds for the first host to answer; where its port cannot be reached, it goes without
_LOOK_EVERY = 0.5  # seconds
_ALIVE_EVERY = 60  # seconds of silence after which the kernels ask each other, so that nothing between them forgets
_COMES_WITHIN = 1.0  # seconds for a host that has just met the others to connect
_LATE = 10.0  # seconds after its goodbye in which the first host still answers who connects
_GOODBYE = b"bye\n"
_LINE = 256  # bytes, at most
_FILES_OF_A_HOST = 3  # two links and JAX's
_NAMED = 8  # hosts, at most, in one line

# Its process ended, has found a mistake of the user, was told to stop and is not waited for, its machine is silent.
Why = Literal["", "mistake", "stopped", "silent"]
Lost = Callable[[int, Why, threading.Event], None]


@dataclass
class _Peer:
    """Who is at the other end of a link, if that is known, and what came of a line that is not whole."""

    host: int | None = None
    rest: bytes = b""
    second: bool = False  # of the links to this host


class Links:
    """A connection from every host to the first one. A host whose connection ends without a goodbye is gone.

    The kernel ends the connections of a process that is killed, while JAX's heartbeats take 45 s to be missed. A
    machine that loses its power, or the network, is silent: see `affinage.hardware.silence`, for whose sake there is a
    second connection, which may end, or not be had. A host that cannot connect to the first is left to the heartbeats,
    and a silent one where this machine does not run Linux. Whoever connects must know a token, which JAX's coordinator
    hands out.

    Args:
        hosts: of the run.
        address: of the first host, as the others know it.
        listens_on: its own address, where that is another one inside.
        lost: called in a thread with the number of a host that is gone, why it is, and an event that is set when this
            host says goodbye.
        patience: seconds that a machine may be silent.
        say: takes a line that names a machine that is silent, or is back; called in a thread.
    """

    def __init__(
        self,
        hosts: Hosts,
        address: str,
        listens_on: str,
        lost: Lost,
        patience: float = PATIENCE,
        say: Callable[[str], None] = print,
    ) -> None:
        self._hosts, self._address, self._listens_on, self._lost = hosts, address, listens_on, lost
        self._patience, self._say = patience, say
        self._farewell = _GOODBYE
        self._news: list[bytes] = []  # who is gone, for hosts that connect later
        self._connect_until = time.monotonic() + _CONNECT
        self._ended = threading.Event()
        self._left: set[int] = set()
        self._links: dict[int, socket.socket] = {}
        self._second: dict[int, socket.socket] = {}
        if hosts.count > 1:
            work = self._serve if hosts.first else self._connect
            threading.Thread(target=work, name="links", daemon=True).start()
            if KNOWN:
                threading.Thread(target=self._look, name="silence", daemon=True).start()

    def say_goodbye(self, why: Why = "") -> None:
        """Before this host leaves in good order, so that nobody takes it for gone; or for what the others are told."""
        self._farewell = _line(self._hosts.index, why) if why else _GOODBYE
        self._ended.set()
        for link in list(self._links.values()):
            self._part(link)

    @property
    def failed(self) -> bool:
        """Whether somebody who is to be connected to this host was not, in the time that there was for it."""
        return not self.complete and time.monotonic() >= self._connect_until

    @property
    def complete(self) -> bool:
        """Whether all who are to be connected to this host are, or have been."""
        return len(self._links) >= (self._hosts.count - 1 if self._hosts.first else 1)

    def wait_until_alone(self, seconds: float) -> None:
        """Wait until all who are connected to this host have ended, at most so long; and a little for who comes yet."""
        begun = time.monotonic()
        while (waited := time.monotonic() - begun) < seconds:
            comes = not self.complete and waited < _COMES_WITHIN
            if not comes and all(link.fileno() < 0 for link in list(self._links.values())):
                return
            time.sleep(0.05)

    def _part(self, link: socket.socket) -> None:
        with contextlib.suppress(OSError):
            link.send(self._farewell)

    def _meet(self, host: int, link: socket.socket) -> None:
        self._links[host] = link
        with contextlib.suppress(OSError):
            for line in self._news:
                link.send(line)
        if self._ended.is_set():  # it was said while nobody could hear it
            self._part(link)

    def _connect(self) -> None:
        try:
            said = json.loads(self._hosts.hear(_KEY, _CONNECT, said="host 0 has not said where it listens"))
            link = self._connected(said)
            self._meet(0, link)
            if KNOWN:
                with contextlib.suppress(OSError):
                    self._second[0] = self._connected(said, " again")
            with link.makefile("rb") as lines:
                while line := lines.readline(_LINE):
                    if line == _GOODBYE:
                        self._left.add(0)
                        return
                    self._gone(*_read(line))
        except ConnectionResetError:
            pass
        except (OSError, HostLost, ValueError):
            return
        self._gone(0)

    def _connected(self, said: dict[str, Any], more: str = "") -> socket.socket:
        link = socket.create_connection((self._address, said["port"]), _CONNECT)
        link.settimeout(None)
        _keep_alive(link)
        link.sendall(f"{said['token']} {self._hosts.index}{more}\n".encode())
        return link

    def _serve(self) -> None:
        _allow_files(_FILES_OF_A_HOST * self._hosts.count)
        try:
            family = socket.getaddrinfo(self._listens_on, 0, type=socket.SOCK_STREAM)[0][0]
            server = socket.create_server(
                (self._listens_on, 0),
                family=family,
                backlog=self._hosts.count,
                dualstack_ipv6=family == socket.AF_INET6 and socket.has_dualstack_ipv6(),
            )
            token = secrets.token_hex(16)
            self._hosts.tell(_KEY, json.dumps({"port": server.getsockname()[1], "token": token}))
        except (OSError, HostLost):
            return
        with server, selectors.DefaultSelector() as selector:
            selector.register(server, selectors.EVENT_READ)
            until = float("inf")
            while time.monotonic() < until:
                for key, _ in selector.select(_LOOK_EVERY):
                    if key.fileobj is server:
                        _accept(server, selector)
                    else:
                        self._hear(selector, key, token)
                if self._ended.is_set():
                    until = min(until, time.monotonic() + _LATE)

    def _hear(self, selector: selectors.BaseSelector, key: selectors.SelectorKey, token: str) -> None:
        link: Any = key.fileobj
        peer: _Peer = key.data
        try:
            said = link.recv(_LINE)
        except ConnectionResetError:
            said = b""
        except OSError:  # the machine or the network does not answer, which may pass
            selector.unregister(link)
            return
        *lines, peer.rest = (peer.rest + said).split(b"\n")
        if not said or len(peer.rest) > _LINE or not all(self._take(line + b"\n", peer, link, token) for line in lines):
            selector.unregister(link)
            link.close()
            if peer.second:
                self._second.pop(peer.host or 0, None)
            elif peer.host is not None:
                self._gone(peer.host)

    def _take(self, line: bytes, peer: _Peer, link: socket.socket, token: str) -> bool:
        """Do what a line says; False where it is none of ours."""
        if peer.host is None:
            peer.host, peer.second = self._known(line, token)
            if peer.host is not None and peer.second:
                self._second[peer.host] = link
            elif peer.host is not None:
                self._meet(peer.host, link)
            return peer.host is not None
        if peer.second:
            return True
        if line == _GOODBYE:
            self._left.add(peer.host)
        elif line in (_line(peer.host, "mistake"), _line(peer.host, "stopped")):
            self._gone(*_read(line))
        else:
            return False
        return True

    def _known(self, said: bytes, token: str) -> tuple[int | None, bool]:
        """The number of a host that knows the token, None for anybody else; and whether it is its second link."""
        word, number, *more = [*said.split(), b"", b""][:3]
        again = more == [b"again"]
        if not hmac.compare_digest(word, token.encode()) or not number.isdigit():
            return None, again
        host = int(number)
        there = self._second if again else self._links
        return host if 0 < host < self._hosts.count and host not in there else None, again

    def _look(self) -> None:
        """Look for machines that are silent, as long as this host is not about to leave."""
        ears: dict[int, Ear] = {}
        while not self._ended.wait(LOOK_EVERY):
            found: dict[str, list[int]] = {}
            if not self._hosts.first and 0 in self._second:
                forget(self._second[0])
            for host, link in list(self._links.items()):
                if host not in self._left:
                    ear = ears.setdefault(host, Ear())
                    with contextlib.suppress(OSError):  # it has ended, which its own thread sees
                        found.setdefault(ear.look_at(link, self._patience, self._second.get(host)), []).append(host)
            if silent := found.get("silent"):
                self._tell(
                    f"{_named(silent)} not answering: the machine, or the network, may be dead. Without an answer for"
                    f" {self._patience:g} s the run is ended."
                )
            if back := found.get("back"):
                self._tell(f"{_named(back)} answering again.")
            for host in found.get("gone", [])[:1]:  # which is the end; where all are, each would be told to all
                self._gone(host, "silent")

    def _tell(self, line: str) -> None:
        # Whoever takes the line may be behind what is cut off.
        threading.Thread(target=self._say, args=(line,), daemon=True).start()

    def _gone(self, host: int, why: Why = "") -> None:
        if self._ended.is_set() or host in self._left:
            return
        self._left.add(host)
        if self._hosts.first:
            self._news.append(_line(host, why))
            for other in set(self._links) - self._left:
                with contextlib.suppress(OSError):
                    self._links[other].send(_line(host, why))
        threading.Thread(target=self._lost, args=(host, why, self._ended), daemon=True).start()


def _accept(server: socket.socket, selector: selectors.BaseSelector) -> None:
    try:
        link, _ = server.accept()
        _keep_alive(link)
        selector.register(link, selectors.EVENT_READ, _Peer())
    except OSError:  # whoever it was is gone already, or too many files are open, which may pass
        time.sleep(_LOOK_EVERY)


def _allow_files(more: int) -> None:
    """Let this process open so many files more than it may, as far as that is its to say; 1,024 is usual."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY not in (soft, hard):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, soft + more), hard))


def _line(host: int, why: Why) -> bytes:
    return f"{host} {why}\n".encode()


def _read(line: bytes) -> tuple[int, Why]:
    number, _, why = line.decode().partition(" ")
    words: dict[str, Why] = {"mistake": "mistake", "stopped": "stopped", "silent": "silent"}
    return int(number), words.get(why.strip(), "")


def _named(hosts: list[int]) -> str:
    names = ", ".join(map(str, hosts[:_NAMED])) + (f" and {len(hosts) - _NAMED} more" if len(hosts) > _NAMED else "")
    return f"host {names} is" if len(hosts) == 1 else f"hosts {names} are"


def _keep_alive(link: socket.socket) -> None:
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if KNOWN:
        ask_often(link)
    elif hasattr(socket, "TCP_KEEPIDLE"):
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _ALIVE_EVERY)
