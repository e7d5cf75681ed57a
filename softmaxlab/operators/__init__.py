"""What stands in for softmax: one frozen dataclass per operator, one small file per family.

An operator is a pure function of a score row. Its name fixes what it means; how fast it is computed is the
business of `softmaxlab.backends`.
"""

from .base import Operator, catalogue, normaliser, parse, probabilities, row_max
from .grid import Grid
from .softmax import Softmax
from .support import MeanThreshold, TopK, pooled_density

__all__ = [
    "Grid",
    "MeanThreshold",
    "Operator",
    "Softmax",
    "TopK",
    "catalogue",
    "normaliser",
    "parse",
    "pooled_density",
    "probabilities",
    "row_max",
]
