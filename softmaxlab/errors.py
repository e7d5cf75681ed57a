"""The one exception of the package: a sentence for the person who gave the input; and what the system adds to one."""


class LabError(Exception):
    """Bad input or a refused situation, said in one sentence.

    The message names the thing, its value and what would be right. The command line prints it
    without a traceback and exits with code 2.
    """


def refusal(error: OSError | RuntimeError) -> str:
    """What the system says of a path that it refuses; a RuntimeError is pathlib's, of a ~user that there is not."""
    return getattr(error, "strerror", None) or str(error)
