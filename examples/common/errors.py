"""Errors that end a program with a one-line message that says what to change."""


class UsageError(ValueError):
    """Arguments that contradict each other or do not match the data."""


class DataError(ValueError):
    """Data that cannot be used."""


class Diverged(ValueError):
    """A loss that is not finite; the message names the option to reduce."""


DIVERGED = 3  # the exit code of a program whose loss diverged
