"""Shared fixtures: a tiny target with a real tokenizer, the same saved as a folder, and the packaged real target."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `tests.tiny` is found from anywhere

from headstart.target import Target, load_target
from tests.tiny import tiny_model, tiny_tokenizer

if "OMP_NUM_THREADS" in os.environ:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture(scope="session")
def tiny_target() -> Target:
    """A random float32 Llama of 3 layers with a byte-level tokenizer and a ChatML template."""
    tokenizer = tiny_tokenizer()
    model = tiny_model("llama", vocab_size=len(tokenizer), max_length=1024)
    return Target(model, tokenizer, "tiny")


@pytest.fixture(scope="session")
def tiny_target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model and tokenizer of `tiny_target`, saved so that `load_target(str(folder))` reads them."""
    folder = tmp_path_factory.mktemp("tiny") / "target"
    tokenizer = tiny_tokenizer()
    tiny_model("llama", vocab_size=len(tokenizer), max_length=1024).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def real_target() -> Target:
    """The packaged SmolLM2-135M in bfloat16, for tests marked `real`."""
    return load_target("smollm2-135m", dtype="bfloat16")


@pytest.fixture(autouse=True)
def tuned_for_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs of heads hold on every machine, so that no test depends on its speed; a module may override this."""
    monkeypatch.setattr("headstart.api.tuned_here", lambda tuning, *_: tuning)
