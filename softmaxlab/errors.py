"""The one exception of the package: a sentence for the person who gave the input."""


class LabError(Exception):
    """Bad input or a refused situation, said in one sentence.

    The message names the thing, its value and what would be right. The command line prints it
    without a traceback and exits with code 2.
    """
