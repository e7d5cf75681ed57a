"""Where the code of a kernel loops, and what its groups of warps do.

A loop is a natural loop of the control-flow graph, that is a branch back to a block that dominates it: waits that spin
behind the code and jump back into its middle are none. A warp role is what only runs after one `setmaxnreg`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from softmaxlab.errors import LabError
from softmaxlab.fa4.sass import Instruction, Listing

_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
_TARGETS = re.compile(r'BRANCH_TARGETS ([^"]*)"')
_REGISTER = re.compile(r"\bR(\d+)\b")
_ENDS = {"BRA", "BRX", "JMP", "EXIT", "RET", "BPT"}


@dataclass(frozen=True)
class Loop:
    """A natural loop, laid out from its head to the branch back.

    Attributes:
        first, last: byte addresses of the head and of the branch back.
        instructions: of one turn, without spinning waits, which lie elsewhere.
    """

    first: int
    last: int
    instructions: tuple[Instruction, ...]

    @property
    def counts(self) -> Counter[str]:
        """Instructions by class."""
        return Counter(i.kind for i in self.instructions)

    @property
    def opcodes(self) -> dict[str, int]:
        """Instructions by opcode with its modifiers, sorted by name."""
        return dict(sorted(Counter(i.opcode for i in self.instructions).items()))


@dataclass(frozen=True)
class Role:
    """What a group of warps does, the registers a thread that it asks for, and how many its code uses."""

    name: str
    registers: int
    used: int


class Flow:
    """The control flow of a disassembled kernel.

    Raises:
        LabError: a branch goes to a label that the disassembly does not hold.
    """

    def __init__(self, listing: Listing) -> None:
        self.instructions, self._labels = listing.instructions, listing.labels
        self._split()

    @cached_property
    def loops(self) -> list[Loop]:
        """All natural loops that are laid out from head to branch, by address."""
        found = []
        for latch in self._reached:
            for head in self._next[latch]:
                if self._dominators[latch] >> head & 1:
                    blocks = sorted(b for b in self._loop_blocks(head, latch) if head <= b <= latch)
                    body = tuple(i for b in blocks for i in self._block(b))
                    found.append(Loop(body[0].address, self._block(latch)[-1].address, body))
        return sorted(found, key=lambda loop: (loop.first, -loop.last))

    @property
    def innermost(self) -> list[Loop]:
        """Loops that hold no other loop."""
        return [
            o for o in self.loops if not any(o is not i and o.first <= i.first and i.last <= o.last for i in self.loops)
        ]

    @cached_property
    def roles(self) -> list[Role]:
        """The warp roles, one a `setmaxnreg`, in the order of the code.

        A role is told by what runs only after it: `softmax` (the row maximum), `correction` (the accumulator's
        rescaling), `mma`, `load`, `store`; `idle` if none of these.
        """
        found = []
        for block in self._reached:
            for i in self._block(block):
                if i.opcode.startswith("USETMAXREG"):
                    after = [j for b in self._reached if self._dominators[b] >> block & 1 for j in self._block(b)]
                    highest = max((_highest(j) for j in after), default=-1)
                    registers = int(re.findall(r"0x[0-9a-f]+|\d+$", i.operands)[-1], 0)
                    found.append(Role(_role(after), registers, highest + 1))
        return found

    # Control flow, as lists over basic blocks; dominators as bit sets

    def _split(self) -> None:
        cuts = {0, *self._labels.values()}
        cuts |= {n + 1 for n, i in enumerate(self.instructions) if i.opcode.split(".")[0] in _ENDS}
        starts = sorted(c for c in cuts if c < len(self.instructions))
        self._bounds = list(zip(starts, [*starts[1:], len(self.instructions)], strict=True))
        number = {start: n for n, start in enumerate(starts)}
        self._next = [self._successors(n, number) for n in range(len(starts))]
        self._previous: list[list[int]] = [[] for _ in starts]
        for n, following in enumerate(self._next):
            for m in following:
                self._previous[m].append(n)
        self._reached = self._reach()
        self._dominators = self._dominate()

    def _block(self, n: int) -> list[Instruction]:
        return self.instructions[slice(*self._bounds[n])]

    def _successors(self, n: int, number: dict[int, int]) -> list[int]:
        last = self._block(n)[-1]
        base = last.opcode.split(".")[0]
        named = _TARGETS.search(last.operands) if base == "BRX" else None
        targets = named[1].split(",") if named else _TARGET.findall(last.operands) if base in ("BRA", "JMP") else []
        following = []
        for target in (t.strip() for t in targets):
            if target not in self._labels:
                raise LabError(f"the branch at {last.address:#x} goes to {target}, which the disassembly does not hold")
            following.append(number[self._labels[target]])
        # A branch may also be conditional on an operand: `BRA.U UP0, target`.
        conditional = last.predicate or re.match(r"!?U?P\d", last.operands) or "DIV" in last.opcode
        if (base not in _ENDS or conditional) and n + 1 < len(self._bounds):
            following.append(n + 1)
        return following

    def _reach(self) -> list[int]:
        seen, stack = set(), [0]
        while stack:
            n = stack.pop()
            if n not in seen:
                seen.add(n)
                stack += self._next[n]
        return sorted(seen)

    def _dominate(self) -> list[int]:
        everything = (1 << len(self._bounds)) - 1
        dominators = [everything] * len(self._bounds)
        dominators[0] = 1
        reached, changed = set(self._reached), True
        while changed:
            changed = False
            for n in self._reached[1:]:
                common = everything
                for p in self._previous[n]:
                    common &= dominators[p] if p in reached else everything
                if dominators[n] != (common := common | 1 << n):
                    dominators[n], changed = common, True
        return dominators

    def _loop_blocks(self, head: int, latch: int) -> set[int]:
        blocks, stack = {head, latch}, [latch] if latch != head else []
        while stack:
            for p in self._previous[stack.pop()]:
                if p not in blocks:
                    blocks.add(p)
                    stack.append(p)
        return blocks


def _highest(instruction: Instruction) -> int:
    """Highest register that an instruction touches; -1 for none. Its first register may begin a range."""
    named = [int(n) for n in _REGISTER.findall(instruction.operands)]
    opcode = instruction.opcode
    if found := re.match(r"(?:LDTM|STTM)\b.*\.x(\d+)", opcode):
        width = int(found[1])
    elif found := re.match(r"[HQ]GMMA\.64x(\d+)x", opcode):
        width = int(found[1]) // 2
    else:
        width = 4 if ".128" in opcode else 2 if re.match(r"F\w+2\b", opcode) or ".64" in opcode else 1
    return max(named[0] + width - 1, *named) if named else -1


def _role(instructions: Iterable[Instruction]) -> str:
    kinds = {i.opcode.split(".")[0] for i in instructions}
    statistics = any(i.opcode.startswith("LDTM.STAT") for i in instructions)
    signs = {
        "softmax": statistics or kinds & {"FMNMX", "FMNMX3"},
        "correction": {"FMUL2", "STTM"} <= kinds,
        "mma": any(k.startswith("UTC") and k.endswith("MMA") for k in kinds),
        "load": "UTMALDG" in kinds,
        "store": "UTMASTG" in kinds,
    }
    return next((role for role, sign in signs.items() if sign), "idle")


@dataclass(frozen=True)
class MainLoop:
    """The loop over key tiles of the warps that compute softmax.

    Attributes:
        loop: one turn, one tile without a mask.
        masked: the same with the mask applied, None where the compiler made no loop of it.
        elements: scores a thread handles in one turn.
    """

    loop: Loop
    masked: Loop | None
    elements: int

    @property
    def per_element(self) -> dict[str, float]:
        """Instructions an element by class, and `total`."""
        counts = {name: count / self.elements for name, count in self.loop.counts.items()}
        return counts | {"total": len(self.loop.instructions) / self.elements}


def main_loop(flow: Flow) -> MainLoop:
    """Find the softmax warps' loop: it takes fresh scores and a row maximum of them.

    Raises:
        LabError: no loop of the kernel does.
    """
    found = [(loop, n) for loop in flow.innermost if (n := _scores(loop)) and _takes_maximum(loop, n)]
    if not found:
        raise LabError("no loop over key tiles was found: the kernel is none of FlashAttention-4's forward kernels")
    found.sort(key=lambda pair: len(pair[0].instructions))
    masked = next((loop for loop, n in found[1:] if n == found[0][1]), None)
    return MainLoop(found[0][0], masked, found[0][1])


def correction_loop(flow: Flow) -> Loop | None:
    """The loop that rescales the accumulator in tensor memory, in warps of its own; None on Hopper."""
    loops = [o for o in flow.innermost if o.counts["tensor memory"] and o.counts["FMUL2"] > o.counts["FFMA2"]]
    return max(loops, key=lambda o: o.counts["FMUL2"], default=None)


def _scores(loop: Loop) -> int:
    """Scores that a thread receives in one turn: loads from tensor memory, or fresh accumulators of a warpgroup."""
    loads = [re.search(r"\.x(\d+)", i.opcode) for i in loop.instructions if i.opcode.startswith("LDTM")]
    fresh = [re.match(r"[HQ]GMMA\.64x(\d+)x", i.opcode) for i in loop.instructions if "RZ, !UPT" in i.operands]
    return sum(int(m[1]) for m in loads if m) + sum(int(m[1]) // 2 for m in fresh if m)


def _takes_maximum(loop: Loop, elements: int) -> bool:
    compared = loop.counts["FMNMX"] + 2 * loop.counts["FMNMX3"]
    # sm_103 takes the maximum while it loads.
    return compared >= elements // 2 or any(i.opcode.startswith("LDTM.STAT") for i in loop.instructions)
