"""What an evaluation of a large model would take, estimated from what a small one took: memory, cards and time.

An estimate assumes that the large model reaches the matrix rate of the measured one on the same card, that what an
operator costs beyond softmax grows with the number of scores, and that layers run one after another, as they do
when they are spread over cards. A small model uses a card less well, so estimates from one are rather too long.
Nothing here is a measurement, and the page says so.
"""

from __future__ import annotations

import json
import math
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from softmaxlab import lookup, memory, paper
from softmaxlab.attention import text_config
from softmaxlab.conditions import BASELINE
from softmaxlab.store import Store


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder that decide its cost; names as in a transformers configuration."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    head_dim: int
    tied: bool = False

    @property
    def parameters(self) -> int:
        """Weights of all matrices, embedding and head; a gated MLP, no biases or norms."""
        head = self.vocab_size * self.hidden_size
        return self.num_hidden_layers * self._layer + (1 if self.tied else 2) * head

    @property
    def _layer(self) -> int:
        projections = (2 * self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_dim
        return self.hidden_size * (projections + 3 * self.intermediate_size)

    @property
    def heads(self) -> int:
        """Attention heads of all layers, which is how many score matrices a block has."""
        return self.num_hidden_layers * self.num_attention_heads

    @property
    def per_token(self) -> int:
        """Multiplications by weights that a token takes: the layers and the head."""
        return self.num_hidden_layers * self._layer + self.vocab_size * self.hidden_size


#: As the models' own configuration files give them (Hugging Face hub, config.json).
SHAPES = {
    "smollm2-135m": Shape(30, 576, 1536, 9, 3, 49152, 64, tied=True),
    "qwen2.5-0.5b": Shape(24, 896, 4864, 14, 2, 151936, 64, tied=True),
    "qwen2.5-1.5b": Shape(28, 1536, 8960, 12, 2, 151936, 128, tied=True),
    "qwen2.5-3b": Shape(36, 2048, 11008, 16, 2, 151936, 128, tied=True),
    "qwen2.5-72b": Shape(80, 8192, 29568, 64, 8, 152064, 128),
    "llama-3.2-1b": Shape(16, 2048, 8192, 32, 8, 128256, 64, tied=True),
    "llama-3.2-3b": Shape(28, 3072, 8192, 24, 8, 128256, 128, tied=True),
    "llama-3.1-8b": Shape(32, 4096, 14336, 32, 8, 128256, 128),
    "llama-3.1-70b": Shape(80, 8192, 28672, 64, 8, 128256, 128),
    "gemma-2-2b": Shape(26, 2304, 9216, 8, 4, 256000, 256, tied=True),
    "mistral-7b-v0.3": Shape(32, 4096, 14336, 32, 8, 32768, 128),
}
#: The two of them that need several cards, by their names in the paper.
LARGE = {"llama-3.1-70b": "Llama-3.1-70B", "qwen2.5-72b": "Qwen2.5-72B"}

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")

#: Memory of a card in GiB, less what the driver takes.
CARDS = {"80 GB": 79, "H200 (141 GB)": 139}

#: What the paper's rows of a large model need besides the matched temperatures, which cost what a temperature costs.
ROWS = (
    "softmax()",
    "grid(K=32,R=4)",
    "grid(K=21)",
    "grid(K=21,R=4)",
    "rowmax_pot(K_max=20)",
    "pot(m=1)",
    "temperature(alpha=0.9)",
)


def head_dim(model: str) -> int | None:
    """Head dimension of a model by its name, that of the same family and size; None where it is not known here."""
    name = lookup.relative(model, SHAPES)
    return None if name is None else SHAPES[name].head_dim


def shape_of(model: PreTrainedModel) -> Shape | None:
    """The shape of a loaded model; None where these sizes do not give its cost, as with a mixture of experts."""
    config = text_config(model)
    sizes = [getattr(config, name, None) for name in list(Shape.__dataclass_fields__)[:6]]
    if not all(isinstance(size, int) for size in sizes) or any(getattr(config, name, None) for name in _EXPERTS):
        return None
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Shape(*sizes, head_dim, bool(config.tie_word_embeddings))


@dataclass(frozen=True)
class Basis:
    """What was measured of one model on one GPU.

    Attributes:
        model, dtype, backend, device: of the measurement.
        shape: of the model.
        seconds: of a block, by condition; those of single layers are left out.
        context: tokens of that block.
    """

    model: str
    dtype: str
    backend: str
    device: str
    shape: Shape
    seconds: dict[str, float]
    context: int = 2048


def flops_per_block(shape: Shape, context: int) -> float:
    """Floating-point operations of a block's forward pass: two a weight and token, and causal attention."""
    return 2.0 * context * shape.per_token + 2.0 * context**2 * shape.heads * shape.head_dim


def bases(store: Store, context: int = 2048) -> list[Basis]:
    """What estimates can start from: the largest models first, and of one the setting with the most conditions.

    A model whose size is neither known nor was recorded is left out, and so is what was measured without a GPU or
    without softmax.
    """
    found = []
    for key, frame, made in store.tables("cost"):
        shape = Shape(**made["shape"]) if "shape" in made else SHAPES.get(key["model"])
        times = frame[~frame.condition.str.contains("@")].set_index("condition")["seconds_per_block"].to_dict()
        if shape and key["context"] == context and BASELINE in times and not key["device"].endswith("CPU"):
            found.append(Basis(*(key[n] for n in ("model", "dtype", "backend", "device")), shape, times, context))
    return sorted(found, key=lambda basis: (-basis.shape.parameters, -len(basis.seconds)))


def seconds(shape: Shape, condition: str, basis: Basis, *, context: int = 2048, blocks: int = 97) -> float:
    """Estimated time of one condition over so many blocks, in seconds; NaN where the condition was not measured."""
    exact, own = basis.seconds[BASELINE], basis.seconds.get(condition, math.nan)
    matrices = exact * flops_per_block(shape, context) / flops_per_block(basis.shape, basis.context)
    scores = (context / basis.context) ** 2 * shape.heads / basis.shape.heads
    return blocks * (matrices + (own - exact) * scores)


def gigabytes(shape: Shape, *, context: int = 2048, itemsize: int = 2) -> tuple[float, float]:
    """Estimated memory in GiB: the weights, and a pass over one block beside them."""
    one_pass = context * memory.bytes_per_token(shape, itemsize, kept_layers=shape.num_hidden_layers)
    return shape.parameters * itemsize / 2**30, (one_pass + memory.CONSTANT) / 2**30


def cards(shape: Shape, card: float, *, context: int = 2048) -> int:
    """How many cards of so many GiB hold the model in bfloat16; each keeps the room that a pass takes."""
    weights, one_pass = gigabytes(shape, context=context)
    layer = weights / shape.num_hidden_layers  # a card holds whole layers, so up to one less than fits
    return math.ceil(weights / (card - one_pass - layer))


def write_page(root: Path) -> Path | None:
    """Write the page on many GPUs from its template, `book/many_gpus-template.md`; None if the book has none.

    Its numbers come from `results/cost` and `results/bench/two_gpus.json`; what is not there yet, it says.
    """
    template = root / "book" / "many_gpus-template.md"
    if not template.is_file():
        return None
    from softmaxlab.status import table

    text = string.Template(template.read_text(encoding="utf-8")).substitute(
        two_gpus=_two_gpus(root / "results" / "bench" / "two_gpus.json"),
        memory=table(*_memory_rows()),
        time=_time_table(bases(Store(root / "results"))),
    )
    page = root / "book" / "_generated" / "many_gpus.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text, encoding="utf-8")
    return page


def _memory_rows() -> tuple[list[str], list[list[str]]]:
    head = ["model", "parameters (B), published", "weights (GiB)", "a pass over one block of 2,048 (GiB)"]
    head += [f"cards of {name}" for name in CARDS]
    rows = []
    for name, printed in LARGE.items():
        shape, published = SHAPES[name], paper.table("table3_cross_model")
        size = published.loc[published["model"] == printed, "params_b"].iloc[0]
        rows.append(
            [printed, size, *(f"{g:.0f}" for g in gigabytes(shape)), *(cards(shape, c) for c in CARDS.values())]
        )
    return head, rows


def _time_table(found: list[Basis]) -> str:
    from softmaxlab.status import code, table

    if not found:
        return "The cost of softmax was not measured on a GPU yet, so there is nothing to estimate from."
    basis = found[0]
    there = [text for text in ROWS if text in basis.seconds]
    times = {text: [seconds(SHAPES[name], text, basis) for name in LARGE] for text in there}
    rows = [(code(t), f"{1000 * basis.seconds[t]:.1f}", *map(hours, times[t])) for t in there]
    rows.append((f"all {len(there)}", "", *(hours(sum(of)) for of in zip(*times.values(), strict=True))))
    head = ["condition", f"{basis.model}, ms a block, measured"]
    head += [f"{printed}, 97 blocks, estimated" for printed in LARGE.values()]
    absent = [code(text) for text in ROWS if text not in basis.seconds]
    return (
        f"{table(head, rows)}\n\nEstimated from {basis.model} in {basis.dtype} on one {basis.device}, backend "
        f"{code(basis.backend)}" + (f"; not measured there: {', '.join(absent)}" if absent else "") + "."
    )


def hours(seconds: float) -> str:
    """A time in words: minutes, hours from an hour and a half on; a dash where there is none."""
    if math.isnan(seconds):
        return "—"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _two_gpus(path: Path) -> str:
    from softmaxlab.status import code, table

    if not path.is_file():
        return "Two GPUs were not measured yet."
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    rows = [
        (run["processes"], f"{run['seconds']:.1f}", f"{run['with_start_and_load_s']:.1f}", run["passes_of_each"])
        for run in report["runs"]
    ]
    head = ("processes, one a GPU", "evaluation (s)", "with start and loading (s)", "passes of each")
    largest = max(report["largest_loss_difference"].values())
    same = (
        "every block's loss is the same to the last digit" if largest == 0 else f"losses differ by {largest:.1g} nats"
    )
    return (
        f"{table(head, rows)}\n\n**Measured** on {report['processes']} × {report['device']}: {report['model']}, "
        f"{report['blocks']} blocks of {report['context']:,} tokens, {report['dtype']}, backend "
        f"{code(report['backend'])}, {len(report['conditions'])} conditions. {report['processes']} processes are "
        f"{report['speed_up']:.2f} times as fast as one, and {same}."
    )
