"""The recipes of the zoo: planned by their targets' configs, and tried on tiny models of the same architectures."""

from __future__ import annotations

import importlib
import io
import json
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import pytest
import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM

from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions
from headstart.drafters.heads import HeadDrafter
from headstart.errors import UserError
from headstart.heads.base import family, make_config
from headstart.model.model import Target
from headstart.model.outline import outline
from headstart.pipeline.data_stages import check_formats
from headstart.pipeline.run import Run
from headstart.recipes.recipe import load_recipe
from headstart.recipes.values import packaged_recipes
from headstart.tree.tree import TreeShape
from tests.heads.test_contract import batch_of
from tests.tiny import tiny_tokenizer

PLANS = Path(__file__).parents[1] / "docs" / "plans"
PARAMETERS = {
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
}
"""As their makers count them, each embedding that is the LM head as well once."""
ZOO = [name for name, file in packaged_recipes().items() if file.parent.name == "zoo"]


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(PLANS.parents[1] / "benchmarks"))
    return importlib.import_module("plans")


def tiny(name: str, folder: Path) -> Target:
    """A random model with the target's architecture, rotary scaling and kinds of layers, and next to no width."""
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 8, "num_attention_heads": 4}
    tokenizer = tiny_tokenizer()
    small |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": len(tokenizer)}
    config = json.loads((PLANS / name / "config.json").read_text())
    if "sliding_window" in config:
        config["sliding_window"] = 8
    (folder / "config.json").write_text(json.dumps({**config, **small, "dtype": "float32"}))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    return Target(model.eval(), tokenizer, load_recipe(name).target.spec)


def test_there_are_ten() -> None:
    assert len(ZOO) == 10 and set(ZOO) == set(PARAMETERS)


@pytest.mark.parametrize("name", ZOO)
def test_a_config_has_the_shapes_of_its_model(name: str) -> None:
    drawn = outline(str(PLANS / name))
    assert drawn.parameters == PARAMETERS[name] and drawn.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ZOO)
def test_a_recipe_fits_a_tiny_model_of_the_architecture(name: str, tmp_path: Path) -> None:
    """Its heads learn something of every step, draft losslessly, and can be served as the recipe says."""
    target, recipe = tiny(name, tmp_path), load_recipe(name, ["heads.draft_vocab_size=64"])
    assert target.eager is None
    heads = family(recipe.heads.family)(make_config(recipe.heads, target))
    heads.warm_start(target)
    tokens = list(range(3, 35))
    steps = list(heads.unroll(batch_of(target, heads, [tokens], prompt=0)))
    assert len(steps) == recipe.heads.draft_steps  # type: ignore[attr-defined]  # of EAGLE-3
    sum(step.logits_MD.logsumexp(-1).sum() for step in steps).backward()  # type: ignore[union-attr]
    assert all(weight.grad is not None for weight in heads.parameters() if weight.requires_grad)

    options = DecodeOptions(max_new_tokens=16, ignore_end=True, draft="on")
    drafter = HeadDrafter(heads.eval(), TreeShape.chain(heads.draft_steps), "chain")
    (plain,), (drafted,) = (DecodeLoop(target, *use).generate([tokens], options) for use in ((), (drafter,)))
    assert drafted.tokens == plain.tokens and drafted.drafter_error is None

    has_hooks = not name.startswith("gemma")
    assert recipe.export.formats == (("vllm",) if has_hooks else ())
    served = load_recipe(name, ["heads.draft_vocab_size=64", "export.formats=[vllm]"])
    run = Run(served, tmp_path / "run", Console(file=io.StringIO()))
    refusal = pytest.raises(UserError, match="vllm passes no hidden states of gemma3_text targets")
    with nullcontext() if has_hooks else refusal:
        check_formats(run, target)


@pytest.mark.parametrize("name", ["docs/scaling.md", "README.md"])
def test_pages_are_up_to_date(name: str, plans: ModuleType) -> None:
    text = (plans.ROOT / name).read_text(encoding="utf-8")
    assert plans.page(name) == text, "run python benchmarks/plans.py"
    assert (f"`{ZOO[0]}`" if name == "README.md" else plans.EXAMPLES[0].command) in text
    assert list(plans.ZOO) == ZOO
