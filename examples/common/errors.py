"""Errors that end a program with a line that says what to change."""


class UsageError(ValueError):
    """Arguments that do not fit together, or not the data; the message says which."""


class DataError(ValueError):
    """The data cannot be used; the message says why."""


class Diverged(ValueError):
    """A loss that is no number any more; the message says of what a smaller value may help."""


DIVERGED = 3  # the exit code where one did
