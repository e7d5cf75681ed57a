"""The command around lm-evaluation-harness: zero-shot. No logic of its own, as in `cli`."""

from __future__ import annotations

from cyclopts import App

from softmaxlab.cli_options import Backend, Device, Dtype, Model, Sections


def mount(app: App) -> None:
    """Put the command under the application's."""
    app.command(zero_shot)


def zero_shot(
    *conditions: str,
    section: Sections = None,
    tasks: list[str] | None = None,
    model: Model = "smollm2-135m",
    data: str = "",
    limit: int = 0,
    batch: int = 8,
    padding: str = "right",
    dtype: Dtype = "float32",
    device: Device = "auto",
    backend: Backend = "reference",
    results: str = "results",
) -> None:
    """Answer zero-shot tasks under conditions, store the answers, and compare each with softmax() in pairs.

    Parameters
    ----------
    conditions
        Text forms such as "softmax()" or "grid(K=32,R=4)". Without any: those of the paper's table and h15().
    tasks
        lambada_openai, hellaswag, arc_easy, arc_challenge, piqa, winogrande; all if not given. May be given several
        times, and one may hold several names between commas.
    data
        Folder of local documents (hellaswag.jsonl, …). Else SOFTMAXLAB_ZERO_SHOT names it, else they come from the
        hub.
    limit
        Only the first so many documents of each task; 0: all.
    batch
        Requests a forward pass. Part of a result's key: lattices turn last digits into steps.
    padding
        right or left.
    results
        Folder of the stored answers.
    """
    from softmaxlab import paired, report
    from softmaxlab import zero_shot as lab
    from softmaxlab.conditions import BASELINE, canonical, named

    texts = canonical([*(t for name in section or () for t in named(name)), *conditions]) or named("zero-shot")
    chosen = [name.strip() for entry in tasks or lab.TASKS for name in entry.split(",")]
    setting = lab.Setting(model=model, dtype=dtype, backend=backend, padding=padding, batch=batch, limit=limit)
    frame = lab.evaluate(texts, setting, tasks=chosen, data=data, device=device, results=results)
    for task in dict.fromkeys(chosen):
        print(f"{lab.TITLES[task]}, {lab.METRICS[task]}, {frame[frame.task == task].document.nunique()} documents")
        for text in texts:
            line = f"  {text}: {paired.score(frame, task, text):.2f} %"
            if BASELINE in texts and text != BASELINE:
                found = paired.change(frame, task, text)
                # One document has a difference and no interval.
                points = report.interval(found.change) if found.n > 1 else report.number(found.points)
                line += f", {points} points, gained {found.gained}, lost {found.lost}"
                line += f", McNemar p = {found.p:.3g}"
            print(line)
