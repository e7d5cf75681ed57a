"""The commands around FlashAttention-4's kernel: audit, doctor, gates, bench. No logic of their own, as in `cli`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from softmaxlab.cli_bench import bench
from softmaxlab.errors import LabError


def mount(app: App) -> None:
    """Put the commands under the application's."""
    for command in (audit, doctor, bench):
        app.command(command)
    app.command("softmaxlab.fa4.gate_record:main", name="gates", help="Send patched kernels through the gates (B.2).")


def audit(
    *,
    arch: str = "sm_100a",
    dtype: str = "bf16",
    causal: bool = False,
    head_dim: int = 128,
    variant: str = "stock",
    gqa: int = 1,
    emulation: str | None = None,
    every: Annotated[bool, Parameter(name="--all")] = False,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
    results: str = "results",
    package: Path | None = None,
) -> None:
    """Compile FlashAttention-4's forward kernel, without a GPU, and count its instructions.

    Parameters
    ----------
    arch
        sm_90a, sm_100a or sm_103a.
    dtype
        bf16, fp16, or on Blackwell fp8 (e4m3) and e5m2.
    causal
        Under a causal mask.
    head_dim
        64, 96 or 128.
    variant
        What stands for the exponential, e.g. stock, h15, "s(7)", "g(3)", fused7, "poly(3,0.5)".
    gqa
        Query heads of a key-value head.
    emulation
        FREQ,START of FA4's software exponential in place of its own setting, as 16,1; of stock on Blackwell.
    every
        Audit all kernels of the book's tables and store them in the results folder.
    as_json
        The whole row as JSON.
    results
        Where --all stores them.
    package
        With --all: a folder that holds another version of flash_attn (pip install --no-deps --target FOLDER
        flash-attn-4==VERSION); only the stock kernel is audited.
    """
    from softmaxlab.fa4 import audit

    if every:
        print(f"the audit is in {audit.record(results, package)}")
        return
    if package is not None:
        raise LabError(f"package {str(package)!r} was given without --all: it goes with --all only")
    setting = audit.parse_emulation(emulation) if emulation is not None else None
    row = audit.audit(arch, dtype, causal, head_dim, variant, gqa=gqa, emulation=setting)
    print(json.dumps(row) if as_json else audit.describe(row))


def doctor(*, tile: Annotated[bool, Parameter(negative="--no-tile")] = True) -> None:
    """Say what of the kernel part works on this machine, and why the rest does not.

    Parameters
    ----------
    tile
        Compile a kernel and check one tile of it.
    """
    from softmaxlab.fa4 import doctor as doctors

    for subject, state, detail in doctors.report(tile).itertuples(index=False):
        print(f"{subject:<30} {state:<14} {detail}".rstrip())
