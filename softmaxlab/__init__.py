"""How accurate must the exponential in attention be, and what does a coarser one buy?"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("softmaxlab")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+source"
