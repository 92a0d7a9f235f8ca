"""Keeps passwords, keys and tokens out of what is said and written."""

import os
import re

_MASK = "***"
_SHORTEST = 8  # characters of a value in the environment: what is shorter stands in ordinary text by chance
_WORDS = "token|secret|password|passwd|signature|credential|api[_-]?key|access[_-]?key"
_VARIABLE = re.compile(rf"({_WORDS}|_key$|^key$)", re.IGNORECASE)
_USER_INFO = re.compile(r"(:/{1,2})[^/\s@?#'\"]+(?=@)")  # a URL that was taken for a path has one slash
_PASSWORD = re.compile(r"(?:https?://|://[^/\s@?#'\"]*:)[^/\s@?#'\"]+@", re.IGNORECASE)  # a token may be the user
_NAMED = re.compile(rf"(?<![\w-])([\w.-]*(?:{_WORDS}))(=|%3D)([^&#\s'\"),]+)", re.IGNORECASE)
_PARAMETER = re.compile(r"(?<=[?&])(key|sig|sas|auth|pwd)(=)([^&#\s'\"),]+)", re.IGNORECASE)
_BEARER = re.compile(r"\b(bearer|basic)(\s+)([\w.~+/=-]{8,})", re.IGNORECASE)
_TOKEN = re.compile(r"\b(?:hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|AKIA[A-Z0-9]{16})\b")


def masked(text: str) -> str:
    """A text with *** in place of secrets.

    Those are the values of environment variables that are called like one (…_TOKEN, …_API_KEY, …_PASSWORD), users and
    passwords in URLs, what follows `token=` and its like, and tokens whose form is known.
    """
    for value in sorted(_in_environment(), key=len, reverse=True):
        text = text.replace(value, _MASK)
    text = _USER_INFO.sub(rf"\1{_MASK}", text)
    for named in (_NAMED, _PARAMETER, _BEARER):
        text = named.sub(rf"\1\2{_MASK}", text)
    return _TOKEN.sub(_MASK, text)


def secret_in(setting: str) -> bool:
    """Whether a setting holds a secret, which would end up in manifests and reports."""
    if "://" in setting and any(pattern.search(setting) for pattern in (_PASSWORD, _NAMED, _PARAMETER)):
        return True
    return bool(_TOKEN.search(setting)) or any(value in setting for value in _in_environment())


def _in_environment() -> set[str]:
    """Values of secrets; those that are paths are the names of files with secrets in them."""
    return {
        value
        for name, value in os.environ.items()
        if len(value) >= _SHORTEST and not value.startswith("/") and _VARIABLE.search(name)
    }
