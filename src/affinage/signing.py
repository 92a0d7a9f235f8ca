"""The key that seals are signed with: whoever cannot read it cannot pass off a checkpoint as one of ours."""

import os
import stat

from affinage.errors import UserError

KEY_VARIABLE = "AFFINAGE_SEAL_KEY_FILE"
_LEAST, _MOST = 32, 4096  # bytes


def handed_on() -> dict[str, str]:
    """What a host elsewhere is to have in its environment: the name of the key's file, which must be there, too.

    Without it that host would sign nothing, and take what nobody has signed, without a word.
    """
    named = os.environ.get(KEY_VARIABLE)
    return {KEY_VARIABLE: named} if named else {}


def signing_key() -> bytes | None:
    """The contents of the file that `$AFFINAGE_SEAL_KEY_FILE` names; None where it is not set.

    Raises:
        UserError: it cannot be read, is too short or too long, or others may read it, too.
    """
    named = os.environ.get(KEY_VARIABLE)
    if not named:
        return None
    where, make = f"{KEY_VARIABLE}={named}", "`(umask 077; head -c 32 /dev/urandom > FILE)` makes one."
    try:
        with open(named, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise UserError("the key is no file", where=where, fix=make)
            if status.st_mode & 0o077:
                raise UserError("others may read the key, or change it", where=where, fix=f"chmod 600 {named}")
            key = file.read(_MOST + 1)
    except OSError as error:
        raise UserError(f"the key cannot be read: {error.strerror}", where=where, fix=make) from error
    if not _LEAST <= len(key) <= _MOST:
        raise UserError(f"a key has {_LEAST} to {_MOST} bytes", where=where, fix=make)
    return key
