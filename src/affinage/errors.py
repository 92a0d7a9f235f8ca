"""The one way in which affinage tells its user that something they gave cannot be used."""

EXIT_USER_ERROR = 2  # a mistake in the input: one message, no traceback
EXIT_PREEMPTED = 75  # stopped from outside after saving; EX_TEMPFAIL, so that a scheduler starts the run again


class UserError(Exception):
    """A mistake of the user, told in one message: what is wrong, where, and what to do about it.

    The command line prints it without a traceback and exits with status 2.
    """

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what = what
        self.where = where
        self.fix = fix
        super().__init__(what)

    def __str__(self) -> str:
        lines = [f"{self.where}: {self.what}" if self.where else self.what]
        if self.fix:
            lines.append(f"  {self.fix}")
        return "\n".join(lines)


class Preempted(Exception):
    """The run was told to stop and has saved itself; the command line exits with EXIT_PREEMPTED."""
