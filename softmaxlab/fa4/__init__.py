"""FlashAttention-4 with another exponential: the patch, its gates, and kernels compiled without a GPU.

Paper §5.2, B.1, B.2, B.5. Only `variants` and what it says about them need no FlashAttention-4.
"""

from .patch import active, flash_attn_func, in_worker, variant
from .serving import disable, enable, register
from .variants import Variant, variants

__all__ = [
    "Variant",
    "active",
    "disable",
    "enable",
    "flash_attn_func",
    "in_worker",
    "register",
    "variant",
    "variants",
]
