"""What stands in for softmax: one frozen dataclass per operator, one small file per family.

An operator is a pure function of a score row. Its name fixes what it means; how fast it is computed is the
business of `softmaxlab.backends`.
"""

from .absolute import ILPoT, ILPoTH15, ILPoTHA, Log2P, LogSqrt2P
from .base import Operator, RowmaxAnchored, catalogue, exponents, normaliser, parse, probabilities, row_max
from .grid import Grid
from .lattice import PoT, RowmaxPoT
from .packed import Packed
from .polynomial import FA4Poly
from .rescue import Rescue, high_mass_set
from .schraudolph import H15, SQ, S
from .softmax import Softmax
from .support import MeanThreshold, TopK, pooled_density
from .temperature import Temperature

__all__ = [
    "H15",
    "SQ",
    "FA4Poly",
    "Grid",
    "ILPoT",
    "ILPoTH15",
    "ILPoTHA",
    "Log2P",
    "LogSqrt2P",
    "MeanThreshold",
    "Operator",
    "Packed",
    "PoT",
    "Rescue",
    "RowmaxAnchored",
    "RowmaxPoT",
    "S",
    "Softmax",
    "Temperature",
    "TopK",
    "catalogue",
    "exponents",
    "high_mass_set",
    "normaliser",
    "parse",
    "pooled_density",
    "probabilities",
    "row_max",
]
