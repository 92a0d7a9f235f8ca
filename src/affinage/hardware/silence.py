"""Whether the machine at the other end of a connection still answers, as the kernel of this one knows it.

A kernel answers as long as its machine runs, whatever its processes are at. So it is the kernels that ask each other
(TCP's keepalive, of no byte, which no buffer has to hold), and Linux tells how long ago the last answer came. It asks
on a connection once a second at most, and answers twice a second at most: so there are two, which are asked in turn. Of
a machine in doubt the second one asks with a byte, too, to which neither applies, so that it takes two lost packets in
a row to call one silent that is not. Linux repeats a lost byte ever more seldom: so the first has never one under way.
"""

import contextlib
import math
import socket
import struct
import sys
import time
from dataclasses import dataclass
from typing import Literal, NamedTuple

PATIENCE = 5.0  # seconds of silence after which a machine is gone, where no recipe says it
LOOK_EVERY = 0.1  # seconds
KNOWN = sys.platform == "linux"  # elsewhere the kernel does not tell it

_ASK_EVERY = 1  # seconds of silence after which the kernels ask, and ask again: the least there is
_MOST_QUESTIONS = 127  # without an answer until the kernel ends the connection: as many as it allows
_ASKED = 1.05  # seconds after the last answer by connection after which there is a question under way
_LOOKS = 3  # in a row that found no answer, until a machine is silent
_LOOKS_UNTIL_GONE = 8
_NEVER = 30.0  # seconds after which one that has never answered is asked no more: the kernel would hang up at last
_ANSWER = 500  # ms: what is heard so long after the last byte was sent or came is the answer to a question
_SLOW = 0.5  # seconds: the longest way to a machine and back that is waited for
_HALF = 0.5  # seconds between answers of two connections that are asked in turn
_OFF = 0.25  # how many more or fewer it may be
_TURNED = 1.5 * _ASK_EVERY  # seconds until the one whose turn was changed has answered
_YOUNG = 0.35  # seconds: where the one has answered since, the other need not be looked at
# Of Linux's struct tcp_info: tcpi_state, tcpi_unacked, tcpi_last_data_sent, _last_ack_sent (never filled),
# _last_data_recv, _last_ack_recv, and tcpi_rtt in microseconds.
_INFO = struct.Struct("=B23xI16xIIII8xI")
_ESTABLISHED = 1

Found = Literal["nothing new", "silent", "back", "gone"]


class _Pace(NamedTuple):
    """Seconds without an answer."""

    asks: float  # after which there was a question
    doubt: float  # after which there is one more question at every look
    silent: float  # after which a machine is silent, if so many looks in a row found no answer


_ALONE = _Pace(_ASK_EVERY, 1.1, 1.6)
_IN_TURN = _Pace(0.6, 0.6, 0.8)


class Since(NamedTuple):
    """Milliseconds since something was last sent to the other end, or heard of it."""

    sent: int  # bytes
    heard: int  # bytes
    answered: int  # that bytes have come, or a question
    trip: float = 0.0  # seconds to the other end and back
    stands: bool = True  # the connection does
    waits: bool = False  # for an answer to a byte

    @property
    def age(self) -> float:
        """Seconds since the last sign of life."""
        return min(self.heard, self.answered) / 1000

    @property
    def to_a_question(self) -> bool:
        """Whether the last answer was one to a question."""
        return self.answered + _ANSWER < min(self.sent, self.heard)


def ask_often(link: socket.socket) -> None:
    """Let the kernel ask the other one after every second of silence."""
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _ASK_EVERY)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _ASK_EVERY)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _MOST_QUESTIONS)


def _ask_now(link: socket.socket) -> None:
    """Let Linux ask at once, if the last answer is a second old."""
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _ASK_EVERY)


def since(link: socket.socket) -> Since:
    """What Linux knows of a connection."""
    told = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    state, unanswered, sent, _, heard, answered, trip = _INFO.unpack(told)
    return Since(sent, heard, answered, min(trip / 1e6, _SLOW), state == _ESTABLISHED, unanswered > 0)


def forget(link: socket.socket) -> None:
    """Read the bytes that the other end has asked with."""
    with contextlib.suppress(OSError):
        link.recv(256, socket.MSG_DONTWAIT)


@dataclass
class Ear:
    """What became of the machine at the other end of one connection, or of two, look by look.

    It is judged only once it has answered a question: something between the two may let none through.
    """

    answers: bool = False
    both: bool = False  # the second connection does, too
    looks: int = 0  # in a row at which it was in doubt
    silent: bool = False
    # By `time.monotonic`: before it, it cannot come in doubt, as with thousands of hosts looks add up; when the second
    # connection is to be asked anew, for its turn to come half a second after the first one's; and until then the two
    # are not asked in turn.
    due: float = 0.0
    turn: float = math.inf
    turned: float = 0.0

    def look(self, now: Since, patience: float, second: Since | None = None) -> Found:
        """What is new.

        Time that went by all at once, as for a virtual machine that stood still, is no silence: that takes looks, too.

        Args:
            now: what the kernel knows.
            patience: seconds without an answer, from the first question on, after which it is gone. So a cut that is
                shorter than that by more than a look ends nothing.
            second: what it knows of a second connection, where the two are asked in turn.
        """
        self.answers = self.answers or now.to_a_question
        pace = _ALONE if second is None else _IN_TURN
        ages = now.age, now.age if second is None else second.age
        if min(ages) < pace.doubt:
            before, self.looks, self.silent = self.silent, 0, False
            return "back" if before else "nothing new"
        if not self.answers or max(ages) < _ASKED:
            return "nothing new"
        self.looks += 1
        if self.silent:
            gone = min(ages) >= pace.asks + patience and self.looks >= _LOOKS_UNTIL_GONE
            return "gone" if gone else "nothing new"
        if min(ages) >= pace.silent + now.trip and self.looks >= _LOOKS:
            self.silent = True
            return "silent"
        return "nothing new"

    def look_at(self, link: socket.socket, patience: float, second: socket.socket | None = None) -> Found:
        """`look` with what is known of connections now; before it is called silent or gone it is asked once more."""
        clock = time.monotonic()
        if clock < self.due:
            return "nothing new"
        links, now, other = [link], since(link), None
        age, pace = now.age, _ALONE if second is None else _IN_TURN
        if second is not None and age >= _YOUNG:
            known = since(second)
            if known.stands:
                links.append(second)
                other = self._in_turn(now, known, second, clock)
                age = min(age, other.age) if other is not None else age
        self.due = min(clock + pace.doubt - age, self.turn)
        if age < _YOUNG and self.answers and not self.looks:  # as nearly always
            return "nothing new"
        found = self.look(now, patience, other)
        if not self.answers and age > _NEVER:
            for each in links:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 0)
            self.due = math.inf
        elif 0 < self.looks <= _LOOKS or (self.answers and age > patience):
            for each in links:
                _ask_now(each)
            if other is not None and self.looks == 1:
                links[1].send(b"\n", socket.MSG_DONTWAIT)
        return found

    def _in_turn(self, now: Since, second: Since, link: socket.socket, clock: float) -> Since | None:
        """What is known of the second connection if the two are asked in turn; else that is seen to."""
        self.both = self.both or second.to_a_question
        if not (self.answers and self.both):
            return None
        if second.waits and not self.looks:  # the first one is answered again
            self.turned = clock + _TURNED
        elif clock >= self.turn:
            for on in (0, 1):  # Linux then asks after a second
                link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, on)
            self.turn, self.turned = math.inf, clock + _TURNED
        elif clock >= self.turned and self.turn == math.inf:
            off = abs(abs(now.age - second.age) - _HALF) > _OFF
            if not off or max(now.age, second.age) >= _ASKED:
                return second
            self.turn = clock + (_HALF - now.age) % _ASK_EVERY
        return None
