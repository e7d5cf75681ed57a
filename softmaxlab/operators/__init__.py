"""What stands in for softmax: one frozen dataclass per operator, one small file per family.

An operator is a pure function of a score row. Its name fixes what it means; how fast it is computed is the
business of `softmaxlab.backends`.
"""

from .base import Operator, catalogue, normaliser, parse, probabilities, row_max
from .grid import Grid
from .lattice import PoT, RowmaxPoT
from .rescue import Rescue, high_mass_set
from .softmax import Softmax
from .support import MeanThreshold, TopK, pooled_density
from .temperature import Temperature

__all__ = [
    "Grid",
    "MeanThreshold",
    "Operator",
    "PoT",
    "Rescue",
    "RowmaxPoT",
    "Softmax",
    "Temperature",
    "TopK",
    "catalogue",
    "high_mass_set",
    "normaliser",
    "parse",
    "pooled_density",
    "probabilities",
    "row_max",
]
