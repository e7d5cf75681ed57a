"""Where the rows of a stored file come from: segments, each of the blocks that were made in one way.

A file's provenance is a list of them: `[{"blocks": [0, 1, 5], "provenance": {"device": "cpu", …}}, …]`.
"""

from __future__ import annotations

from softmaxlab.parquet import BadFile


def check(segments: object) -> None:
    """Raise BadFile unless it is such a list."""
    if not isinstance(segments, list) or not all(map(_is_segment, segments)):
        raise BadFile("its provenance is no list of blocks and how they were made")


def _is_segment(segment: object) -> bool:
    if not isinstance(segment, dict) or not isinstance(segment.get("provenance"), dict):
        return False
    blocks = segment.get("blocks")
    return isinstance(blocks, list) and all(type(block) is int for block in blocks)


def extended(segments: list, blocks: list[int], provenance: dict) -> list:
    """The list with these blocks in the segment that was made the same way, else in a new one."""
    for i, segment in enumerate(segments):
        if segment["provenance"] == provenance:
            grown = {"blocks": sorted({*segment["blocks"], *blocks}), "provenance": provenance}
            return [*segments[:i], grown, *segments[i + 1 :]]
    return [*segments, {"blocks": blocks, "provenance": provenance}]


def flattened(segments: list) -> dict[str, list]:
    """Values of each provenance entry over all segments, nested names joined by dots."""
    values: dict[str, list] = {}

    def collect(entry: object, name: str) -> None:
        if isinstance(entry, dict):
            for key, value in entry.items():
                collect(value, f"{name}.{key}" if name else key)
        else:
            values.setdefault(name, []).append(entry)

    for segment in segments:
        collect(segment["provenance"], "")
    return values
