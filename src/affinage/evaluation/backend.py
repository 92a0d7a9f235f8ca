"""affinage's models as lm-evaluation-harness sees them."""

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from affinage.cluster.processes import Processes
from affinage.data.chat import ChatTemplate, chat_template, guarded
from affinage.errors import UserError
from affinage.evaluation.scoring import score
from affinage.generation.engine import Generation, generate
from affinage.generation.model import LoadedModel
from affinage.generation.sampling import SamplingParams

# Seconds that one host may take longer than another to fetch a task's data and to write its questions. They wait here:
# inside a program of all hosts, the earlier one would seem to hang.
_APART = 3600.0
_MAX_NEW_TOKENS = 64  # of tasks that state none


class JaxLM(TemplateLM):
    """Scores and generates for the harness.

    Every text begins with <s>, as every document did in training; the `hf` backend does the same with
    `add_bos_token=True`. Raw text never becomes a control token; in a text that `apply_chat_template` made, the
    template's control tokens are, and those that a message spells are not.
    """

    eot_token_id = prefix_token_id = max_length = 0  # of the harness's interface, as is the name in its cache
    tokenizer_name = ""

    def __init__(
        self,
        model: LoadedModel,
        batch: int = 64,  # rows of the model's context that memory holds at once
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        super().__init__()
        self.model = model
        self.requests = 0  # continuations scored and texts generated so far
        self.seconds = 0.0  # spent on scoring and generating
        self.in_chat_template = False  # whether the texts of requests were made by `apply_chat_template`
        self._progress, self._batch = progress, batch
        self._encode = lru_cache(maxsize=1024)(model.tokenizer.encode)  # choices share their question
        self._truncated: set[tuple[str, ...]] = set()  # see `was_truncated`
        tokenizer = model.tokenizer
        self.eot_token_id, self.prefix_token_id = tokenizer.eos, tokenizer.bos  # </s>; <s> stands for an empty context
        self.max_length, self.tokenizer_name = model.context, f"affinage-{model.name}"
        if (template := tokenizer.template) is None:
            source = chat_template(model.system_prompt, opened=bool(tokenizer.opening))
            template = ChatTemplate(source, tokenizer)
        self._template = template

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the template's text, for the harness's records."""
        return self._template.source if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the conversation in the chat template; without a generation prompt its last message is left open."""
        self.in_chat_template = True
        own = self.model.tokenizer.template is not None
        messages = guarded(chat_history, self.model.tokenizer, self.model.system_prompt if own else "")
        text, last = self._template.render(messages, add_generation_prompt=add_generation_prompt), messages[-1]
        content = str(last["content"]).strip()  # as some templates do, too
        if add_generation_prompt:
            return text
        if (place := text.rfind(content)) >= 0:
            return text[: place + len(content)]
        return self._template.render(messages[:-1], add_generation_prompt=True) + content  # the template changes it

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the ids of a text, after <s> unless `add_special_tokens` is False or the template has put it there."""
        tokenizer = self.model.tokenizer
        ids = tokenizer.encode_rendered(string)[0] if self.in_chat_template else self._encode(string)
        if self.in_chat_template and tokenizer.template is not None:
            return ids  # its beginning is the template's business
        opening = list(tokenizer.opening)
        return ids if add_special_tokens is False or ids[: len(opening)] == opening else [*opening, *ids]

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        before, scored = super()._encode_pair(context, continuation)
        if not scored:  # the continuation has merged into the context's last token: score that one
            before, scored = before[:-1], before[-1:]
        return before, scored

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        self._truncated |= {text for text, before, after in requests if len(before) + len(after) > self.max_length + 1}

        def keep(index: int, answer: tuple[float, bool]) -> None:
            self.cache_hook.add_partial("loglikelihood", requests[index][0], answer)

        return self._score(pairs, "continuations", keep)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """Return the log-probability of every text, in disjoint windows of the context, the first one after <s>."""
        return self._rolling([request.args[0] for request in requests])

    def bits_per_byte(self, texts: Sequence[str]) -> float:
        """Return the bits that the model needs per UTF-8 byte of the texts, the ends of texts included."""
        total = sum(len(text.encode("utf-8")) for text in texts)
        return -sum(self._rolling(texts, (self.eot_token_id,))) / math.log(2) / total

    def _rolling(self, texts: Sequence[str], end: Sequence[int] = ()) -> list[float]:
        owners: list[int] = []
        windows: list[tuple[list[int], list[int]]] = []
        for index, text in enumerate(texts):
            for window in get_rolling_token_windows(
                token_list=[*self.model.tokenizer.encode(text), *end],
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                owners.append(index)
                windows.append(make_disjoint_window(window))
        self._truncated |= {(texts[index],) for index, pieces in Counter(owners).items() if pieces > 1}
        totals = [0.0] * len(texts)
        for index, (value, _) in zip(owners, self._score(windows, "windows of text"), strict=True):
            totals[index] += value
        return totals

    def was_truncated(self, arguments: Sequence[Any]) -> bool:
        """Return whether a request of these arguments did not fit the context: it was cut, or scored in pieces."""
        return tuple(text for text in arguments if isinstance(text, str)) in self._truncated

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Return the text after every context, up to a stop string, <|im_end|>, </s> or the length of the task."""
        grouped: dict[SamplingParams, list[int]] = {}
        for index, request in enumerate(requests):
            grouped.setdefault(self._params(request.args[1]), []).append(index)
        texts: dict[int, str] = {}
        with self._timed(len(requests)):
            for params, indices in grouped.items():
                room = self.max_length - params.max_new_tokens
                prompts = [self.tok_encode(requests[index].args[0]) for index in indices]
                pairs = zip(indices, prompts, strict=True)
                self._truncated |= {(requests[index].args[0],) for index, ids in pairs if len(ids) > room}
                prompts = [ids[-room:] or [self.prefix_token_id] for ids in prompts]

                def keep(place: int, generation: Generation, indices: list[int] = indices) -> None:
                    texts[indices[place]] = generation.text
                    self.cache_hook.add_partial("generate_until", requests[indices[place]].args, generation.text)
                    self._progress(f"generated {len(texts):,} of {len(requests):,} texts")

                generate(self.model, prompts, params, keep, max_num_seqs=self._batch)
        return [texts[index] for index in range(len(requests))]

    def _params(self, settings: Mapping[str, Any]) -> SamplingParams:
        """The harness's generation settings as ours."""
        kwargs = normalize_gen_kwargs(dict(settings), _MAX_NEW_TOKENS)
        if kwargs.get("repetition_penalty") not in (None, 1, 1.0):
            raise UserError("`repetition_penalty` of a task's `generation_kwargs` is not computed", fix="Leave it out.")
        # The end of a document or a turn always ends a generation, so its spelling need not be looked for.
        until = [stop for stop in handle_stop_sequences(kwargs.get("until"), eos=None) if stop]
        return SamplingParams(
            max_new_tokens=min(int(kwargs["max_gen_toks"]), self.max_length // 2),  # half is left for the prompt
            temperature=float(kwargs.get("temperature", 1.0)) if kwargs.get("do_sample", False) else 0.0,
            top_k=int(kwargs.get("top_k") or 0),
            top_p=float(kwargs.get("top_p", 1.0)),
            min_p=float(kwargs.get("min_p") or 0.0),
            stop=tuple(stop for stop in until if stop not in self.model.tokenizer.controls),
        )

    def _score(
        self,
        pairs: list[tuple[list[int], list[int]]],
        what: str,
        answered: Callable[[int, tuple[float, bool]], None] = lambda _index, _answer: None,
    ) -> list[tuple[float, bool]]:
        scored = itertools.count(1)

        def keep(index: int, answer: tuple[float, bool]) -> None:
            answered(index, answer)
            if (count := next(scored)) % 16 == 0 or count == len(pairs):
                self._progress(f"scored {count:,} of {len(pairs):,} {what}")

        with self._timed(len(pairs)):
            return score(self.model, pairs, keep, batch=self._batch)

    @contextmanager
    def _timed(self, requests: int) -> Iterator[None]:
        """Wait for the other hosts, then count requests and seconds."""
        Processes.at_work().barrier("the questions of a task", seconds=_APART)
        started = time.monotonic()
        yield
        self.requests += requests
        self.seconds += time.monotonic() - started
