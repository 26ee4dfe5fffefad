"""train.compile: what is compiled computes the same, and a missing compiler is said."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager

from headstart.errors import UserError
from headstart.train import machine
from headstart.train.machine import check_compiler
from tests.train.conftest import Train
from tests.train.results import metrics


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Operations of each graph that is compiled, by a backend without a compiler."""
    made: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        made.append(len(graph.graph.nodes))
        return aot_eager(graph, inputs)

    monkeypatch.setattr(machine, "BACKEND", backend)
    yield made
    torch._dynamo.reset()


def test_compiled_it_learns_the_same(run: Train, tmp_path: Path, graphs: list[int]) -> None:
    """Float32 sums in another order; see the golden losses for how far Adam carries them."""
    settings = {"steps": 2, "eval_every": 1, "gradient_checkpointing": True}
    for folder in ("plain", "compiled"):
        run(tmp_path / folder, compile=folder == "compiled", **settings)
    assert len(graphs) >= 2 and max(graphs) > 10, "layers and loss"
    plain, other = ([row["loss"] for row in metrics(tmp_path / folder)][1:] for folder in ("plain", "compiled"))
    assert other == pytest.approx(plain, rel=1e-3)


def test_without_a_compiler_it_is_refused(run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UserError, match=r"train\.compile needs a C\+\+ compiler") as told:
        run(tmp_path, compile=True)
    assert "train.compile=false" in told.value.remedy
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: False)
    with pytest.raises(UserError, match="needs triton"):
        check_compiler("cuda")
