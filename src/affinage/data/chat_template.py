"""Any Jinja chat template of a Hugging Face tokenizer, rendered in a sandbox.

The same text and ids as transformers' `apply_chat_template`, with two differences that are meant: content that spells a
control token stays text, and there is no clock (`strftime_now`), because rows must be the same tomorrow.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.ext
import jinja2.filters
import jinja2.sandbox
import jinja2.visitor
from jinja2 import nodes

from affinage.data.special_tokens import Marks, shielded_piece
from affinage.errors import UserError

if TYPE_CHECKING:
    from affinage.data.tokenizer import Tokenizer

Message = Mapping[str, str]  # role, content, and of some answers REASONING
Span = tuple[int, int]  # of characters

_MOST_TURNS = 100_000  # of all loops of one rendering
_MOST_CHARACTERS = 10_000_000  # of what one rendering makes, and of every text on the way
WHERE = "chat_template"  # the setting that messages name
REASONING = "reasoning_content"  # of a message: what was thought before its content was said
PROBE = "Zq7"  # a text that no template has of itself

_NO_SYSTEM = "If it knows no system messages, set `system_prompt: ''` and leave them out of the conversations."
_DATE = (
    "There is no clock, because rows must be the same tomorrow. Write the date into the first line of the template: "
    "{% macro strftime_now(format) %}2026-01-31{% endmacro %}"
)


class ChatTemplate:
    """A template with the special tokens that it may name.

    Args:
        source: Jinja.
        special_tokens: {bos_token: its spelling, ...}.

    Raises:
        UserError: it is no Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self.special_tokens = dict(special_tokens)
        self._marks: Marks | None = None
        self._ends: tuple[int, ...] | None = None
        self._environment = _Sandbox()
        self._one_at_a_time = threading.Lock()  # the sandbox counts and keeps what the rendering under way makes
        try:
            self._template = self._environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise UserError(f"this is not a chat template: {error}", where=WHERE) from error

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """The conversation as text. Raises UserError for one that the template refuses."""
        return self.rendered(messages, add_generation_prompt=add_generation_prompt)[0]

    def rendered(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> tuple[str, list[Span]]:
        """The text, and the parts of it in {% generation %} blocks. Raises UserError as `render` does."""
        told = [_told(message) for message in messages]
        try:
            with self._one_at_a_time:
                self._environment.begin()
                pieces = self._template.generate(
                    messages=told,
                    tools=None,
                    documents=None,
                    add_generation_prompt=add_generation_prompt,
                    **self.special_tokens,
                )
                self._environment.collect(pieces)
                return "".join(self._environment.pieces), list(self._environment.spans)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            roles = ", ".join(message["role"] for message in told)
            fix = _DATE if "strftime_now" in str(error) else _NO_SYSTEM
            raise UserError(
                f"the chat template refuses a conversation of {roles}: {error}", where=WHERE, fix=fix
            ) from error
        except (RecursionError, MemoryError) as error:
            raise UserError("the chat template does not come to an end", where=WHERE) from error

    def encode_prompt(self, messages: Sequence[Message], tokenizer: "Tokenizer") -> list[int]:
        """Ids of a conversation, after which the model answers."""
        return tokenizer.encode_rendered(self.render(shield(messages, tokenizer), add_generation_prompt=True))[0]

    def ends(self, tokenizer: "Tokenizer") -> tuple[int, ...]:
        """The control token that ends an answer; none where the template has no such."""
        if self._ends is None:
            try:
                text = self.render([{"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE}])
            except UserError:  # one that wants more than that; then the tokenizer's own ends of a text do
                text = ""
            after = tokenizer.encode_rendered(text[text.rfind(PROBE) + len(PROBE) :])[0]
            controls = set(tokenizer.controls.values())
            self._ends = tuple(token for token in after if token in controls)[:1]
        return self._ends

    def marks(self, tokenizer: "Tokenizer") -> Marks:
        """What rows of its conversations are read by: each is ended by a token that none of them holds.

        Raises:
            UserError: the vocabulary has no control token but those that the template writes.
        """
        if self._marks is not None:
            return self._marks
        question, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}
        thoughtful = {**answer, REASONING: "?"}  # around which some write control tokens of their own
        talks = [[question, each, question, each] for each in (answer, thoughtful)]
        written = {token for talk in talks for token in tokenizer.encode_rendered(self.render(talk))[0]}
        likely = [tokenizer.marks.end, tokenizer.pad, *tokenizer.controls.values()]
        found = next((token for token in likely if token is not None and token not in written), None)
        if found is None:
            raise UserError("the vocabulary has no token that could stand between conversations", where=WHERE)
        pad = found if tokenizer.pad is None or tokenizer.pad in written else tokenizer.pad
        self._marks = Marks(None, found, pad)
        return self._marks


def _told(message: Message) -> dict[str, str]:
    """A message as templates read it: some know its reasoning as `thinking`, as transformers tells it, too."""
    told = {"role": str(message["role"]), "content": str(message["content"])}
    if REASONING not in message:
        return told
    return {**told, REASONING: str(message[REASONING]), "thinking": str(message[REASONING])}


def shield(messages: Sequence[Message], tokenizer: "Tokenizer") -> list[Message]:
    """The messages with whatever spells a control token marked as none; see `Tokenizer.encode_rendered`."""

    def shielded(text: str) -> str:
        for piece in tokenizer.controls:
            text = text.replace(piece, shielded_piece(piece))
        return text

    said = ("content", REASONING)
    return [{key: shielded(text) if key in said else text for key, text in each.items()} for each in messages]


def unshielded(text: str, tokenizer: "Tokenizer") -> str:
    """A rendered text as a person reads it."""
    for piece in tokenizer.controls:
        text = text.replace(shielded_piece(piece), piece)
    return text


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja as chat templates know it, without a way to anything but the messages, and with an end to every loop."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        self.filters["tojson"] = _to_json
        for name in _LONG_FILTERS:
            del self.filters[name]
        self.filters["join"], self.filters["replace"] = _join_filter, _replaced
        self.globals = {"range": self.globals["range"], "raise_exception": _raise, "namespace": _Namespace}
        self.globals["dict"] = self.new_dict
        self.begin()

    def begin(self) -> None:
        """Before every rendering."""
        self.pieces: list[str] = []
        self.spans: list[Span] = []
        self._turns = self._length = 0
        self._made: dict[int, tuple[Any, int]] = {}  # by id, which stays theirs as they are kept: sizes of collections

    def collect(self, pieces: Iterator[str]) -> None:
        """Keep what a rendering makes, up to a limit."""
        for piece in pieces:
            self.pieces.append(piece)
            self._length += len(piece)
            if self._length > _MOST_CHARACTERS:
                raise jinja2.TemplateError("it writes without end")

    def generated(self, text: str) -> None:
        """Note that what comes next was generated."""
        self.spans.append((self._length, self._length + len(text)))

    def turn(self) -> str:
        """Count a turn of a loop, or a call of a macro."""
        self._turns += 1
        if self._turns > _MOST_TURNS:
            raise jinja2.TemplateError("its loops do not come to an end")
        return ""

    def made(self, collection: Any) -> Any:
        """Count all that a tuple, a list or a dict holds: (a, a) of (a, a), forty times over, has no end."""
        if self._size(collection) > _MOST_CHARACTERS:
            raise jinja2.sandbox.SecurityError("a text or a collection is too large")
        return collection

    def new_dict(self, **entries: Any) -> Any:
        """What `dict` is to a template."""
        return self.made(entries)

    def _size(self, value: Any) -> int:
        if isinstance(value, str):
            return len(value)
        if not isinstance(value, list | tuple | dict):
            return 1
        if id(value) not in self._made:
            held = [*value, *value.values()] if isinstance(value, dict) else value
            self._made[id(value)] = (value, 1 + sum(self._size(each) for each in held))
        return self._made[id(value)][1]

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        parsed = _Collections(self).visit(super()._parse(source, name, filename))
        body: Any
        for body in parsed.find_all((nodes.For, nodes.Macro)):
            call = nodes.Call(nodes.EnvironmentAttribute("turn"), [], [], None, None)
            body.body.insert(0, nodes.ExprStmt(call).set_lineno(body.lineno))
        return parsed

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Nothing that begins with an underscore, and no method that makes texts as long as one asks for."""
        return attr not in _LENGTHENING and super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        """Refused when it is asked for, not when something is done with it."""
        raise jinja2.sandbox.SecurityError(f"`{attribute}` is out of a template's reach")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """An operator, unless what comes out would be too large."""
        if _size_of(operator, left, right) > _MOST_CHARACTERS:
            raise jinja2.sandbox.SecurityError(f"`{operator}` would make something too large")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        """A function or a method; those of texts that lengthen them have a limit."""
        text, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if isinstance(text, str) and name == "replace":
            return _replaced(text, *args, **kwargs)
        if isinstance(text, str) and name == "join":
            return _joined(text, *args)
        return super().call(context, function, *args, **kwargs)


class _Collections(jinja2.visitor.NodeTransformer):
    """Has the sandbox see every tuple, list, dict and text a ~ b that a template spells."""

    def __init__(self, environment: _Sandbox) -> None:
        self._environment = environment

    def visit_List(self, node: Any) -> nodes.Node:
        """See Jinja."""
        self.generic_visit(node)
        seen = nodes.Call(nodes.EnvironmentAttribute("made"), [node], [], None, None)
        return seen.set_lineno(node.lineno).set_environment(self._environment)

    visit_Dict = visit_List
    visit_Concat = visit_List

    def visit_Tuple(self, node: Any) -> nodes.Node:
        """See Jinja; in `for a, b in` nothing is made."""
        return self.visit_List(node) if node.ctx == "load" else node


# Texts and lists as long as one asks for, what takes ages of a long text, and what is another one tomorrow.
_LONG_FILTERS = ("batch", "center", "format", "indent", "pprint", "random", "slice", "urlize", "wordwrap")
_SIZED = (str, list, tuple)
_LENGTHENING = frozenset({"ljust", "rjust", "center", "zfill", "expandtabs", "format", "format_map", "translate"})


def _size_of(operator: str, left: Any, right: Any) -> int:
    if operator == "+":
        return sum(len(side) for side in (left, right) if isinstance(side, _SIZED))
    if operator == "*":
        pairs = [(left, right), (right, left)]
        return max(
            (len(a) * b for a, b in pairs if isinstance(a, str | list | tuple) and isinstance(b, int)), default=0
        )
    if operator == "%":
        return _MOST_CHARACTERS + 1 if isinstance(left, str) else 0
    return _MOST_CHARACTERS + 1 if abs(right) > 64 or abs(left) > 2**32 else 0


def _replaced(text: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = str(text), str(old), str(new)
    times = text.count(old) if count is None or count < 0 else count
    if len(text) + times * len(new) > _MOST_CHARACTERS:
        raise jinja2.sandbox.SecurityError("`replace` would make something too large")
    return text.replace(old, new, times)


def _joined(separator: str, values: Iterable[Any]) -> str:
    texts, length = [], 0
    for value in values:
        texts.append(str(value))
        length += len(texts[-1]) + len(separator)
        if length > _MOST_CHARACTERS:
            raise jinja2.sandbox.SecurityError("`join` would make something too large")
    return separator.join(texts)


@jinja2.pass_environment
def _join_filter(environment: Any, values: Iterable[Any], d: Any = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        values = map(jinja2.filters.make_attrgetter(environment, attribute), values)
    return _joined(str(d), values)


class _Generation(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %}: what the assistant says."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        """See Jinja."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    def _said(self, caller: Any) -> str:
        text: str = caller()
        self.environment.generated(text)  # type: ignore[attr-defined]
        return text


class _Namespace(jinja2.utils.Namespace):
    """Without names that begin with an underscore."""

    def __repr__(self) -> str:
        return "<namespace>"  # Jinja's spells all that is in it, and what is in that

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise jinja2.sandbox.SecurityError(f"a namespace has no {name!r}")
        super().__setitem__(name, value)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    import json

    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=None if indent is None else min(int(indent), 8),
        separators=separators,
        sort_keys=sort_keys,
    )
