"""Whether the machine at the other end of a connection still answers, as the kernel of this one knows it.

A kernel answers as long as its machine runs, whatever its processes are at. So it is the kernels that ask each other
(TCP's keepalive, of no byte, which no buffer has to hold), and Linux tells how long ago the last answer came.
"""

import socket
import struct
import sys
import time
from dataclasses import dataclass
from typing import Literal, NamedTuple

PATIENCE = 5.0  # seconds of silence after which a machine is gone, where no recipe says it
LOOK_EVERY = 0.25  # seconds
KNOWN = sys.platform == "linux"  # elsewhere the kernel does not tell it

_ASK_EVERY = 1  # seconds of silence after which the kernels ask, and ask again: the least there is
_MOST_QUESTIONS = 127  # without an answer until the kernel ends the connection: as many as it allows
_DOUBT = 1.1  # seconds without an answer after which there is one more question at every look
_SILENT = 1.6  # seconds after which a machine is silent, if so many looks in a row found no answer
_LOOKS = 3
_NEVER = 30.0  # seconds after which one that has never answered is asked no more: the kernel would hang up at last
_ANSWER = 500  # ms: what is heard so long after the last byte was sent or came is the answer to a question
# Of Linux's struct tcp_info: tcpi_last_data_sent, _last_ack_sent (never filled), _last_data_recv, _last_ack_recv.
_SINCE = struct.Struct("=IIII")
_SINCE_AT = 44

Found = Literal["nothing new", "silent", "back", "gone"]


class Since(NamedTuple):
    """Milliseconds since something was last sent to the other end, or heard of it."""

    sent: int  # bytes
    heard: int  # bytes
    answered: int  # that bytes have come, or a question


def ask_often(link: socket.socket) -> None:
    """Let the kernel ask the other one after every second of silence."""
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _ASK_EVERY)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _ASK_EVERY)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _MOST_QUESTIONS)


def since(link: socket.socket) -> Since:
    """What Linux knows of a connection."""
    told = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SINCE_AT + _SINCE.size)
    sent, _, heard, answered = _SINCE.unpack_from(told, _SINCE_AT)
    return Since(sent, heard, answered)


@dataclass
class Ear:
    """What became of the machine at the other end of one connection, look by look.

    It is judged only once it has answered a question: something between the two may let none through.
    """

    answers: bool = False
    looks: int = 0  # in a row at which it was in doubt
    silent: bool = False
    due: float = 0.0  # by `time.monotonic`, before which it cannot come in doubt: with thousands of hosts looks add up

    def look(self, now: Since, patience: float) -> Found:
        """What is new.

        Time that went by all at once, as for a virtual machine that stood still, is no silence: that takes looks, too.

        Args:
            now: what the kernel knows.
            patience: seconds without an answer, from the first question on, after which it is gone. So a cut that is
                shorter than that by more than a look ends nothing.
        """
        self.answers = self.answers or now.answered + _ANSWER < min(now.sent, now.heard)
        seconds = min(now.heard, now.answered) / 1000
        if seconds < _DOUBT:
            before, self.looks, self.silent = self.silent, 0, False
            return "back" if before else "nothing new"
        if not self.answers:
            return "nothing new"
        self.looks += 1
        if self.silent:
            return "gone" if seconds >= _ASK_EVERY + patience else "nothing new"
        if seconds >= _SILENT and self.looks >= _LOOKS:
            self.silent = True
            return "silent"
        return "nothing new"

    def look_at(self, link: socket.socket, patience: float) -> Found:
        """`look` with what is known of a connection now; before it is called silent or gone it is asked once more."""
        if time.monotonic() < self.due:
            return "nothing new"
        now = since(link)
        found = self.look(now, patience)
        seconds = min(now.heard, now.answered) / 1000
        self.due = time.monotonic() + _DOUBT - seconds
        if not self.answers and seconds > _NEVER:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 0)
            self.due = float("inf")
        elif 0 < self.looks <= _LOOKS or (self.answers and seconds > patience):
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _ASK_EVERY)  # Linux then asks at once
        return found
