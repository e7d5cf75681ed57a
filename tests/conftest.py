"""Shared by the tests: one thread a worker, and a tiny random model with a tokenizer of its own."""

import os
import sys
from pathlib import Path

import pytest
import torch

# Workers that each use all cores slow each other down many times over.
if os.environ.get("PYTEST_XDIST_WORKER"):
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the kernels and processes that tests start

TEXT = "The exponential in attention is rounded, cut off or replaced, and the loss tells what it costs. " * 20


def make_tiny_model(folder: Path, *, seed: int = 0, **changes) -> Path:
    """A random Llama of three layers with grouped queries, and a byte-level tokenizer trained on one sentence."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator([TEXT], vocab_size=300, min_frequency=1, special_tokens=["<s>"], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, bos_token="<s>")
    torch.manual_seed(seed)
    settings = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": None,
        "initializer_range": 0.3,  # else the scores are all but equal, and every operator gives the same loss
    }
    LlamaForCausalLM(LlamaConfig(**settings | changes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """Folder of the tiny model."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def text_file(tmp_path_factory) -> Path:
    """A short text file for the tiny model."""
    path = tmp_path_factory.mktemp("text") / "prose.txt"
    path.write_text(" ".join(f"{i} {TEXT[i % 90 :]}" for i in range(12)), encoding="utf-8")
    return path


@pytest.fixture
def run(monkeypatch, capsys):
    """The command line: arguments → exit code, output, errors."""
    from softmaxlab import cli

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["softmaxlab", *map(str, arguments)])
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        out = capsys.readouterr()
        return code, out.out, out.err

    return call
