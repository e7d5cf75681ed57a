"""`python -m softmaxlab` is the command `softmaxlab`."""

from softmaxlab.cli import main

main()
