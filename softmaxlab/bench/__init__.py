"""Time, energy and counters of FlashAttention-4 with another exponential, on a Hopper or Blackwell GPU.

Paper B.3–B.5. Every program takes the kernels in turn, so that a drift of the clock meets each of them; keeps what it
has measured after every turn, so that a run that is stopped goes on where it was; and runs without a GPU as a
rehearsal, with a kernel in PyTorch and a clock that is made up.

`operators` is apart from these: what an operator costs in a backend beside torch's own attention, on GPU or CPU.
"""
