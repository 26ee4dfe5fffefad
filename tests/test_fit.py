"""Settings chosen by the GPUs and engines of the machine."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from headstart.model.outline import outline
from headstart.pipeline.fit import fit_recipe, fit_to_gpus, training_bytes
from headstart.recipes.recipe import Recipe, load_recipe
from headstart.recipes.values import given_keys, recipe_text

PLANS = Path(__file__).parents[1] / "docs" / "plans"
GB = 10**9
TURNS: dict[str, Any] = {"data.states": "stored"}
HALF = {"train.batch_tokens": 8192, "train.gradient_accumulation_steps": 2}
QUARTER = {"train.batch_tokens": 4096, "train.gradient_accumulation_steps": 4}
PAIRS = {"data.server_arguments": "--tensor-parallel-size 2"}
SPANNED = {"data.states": "online", "data.server_arguments": "--tensor-parallel-size 4", "target.device": "all"}
CASES = {
    "8B, 24 GB": ("eagle3-8b", "llama-3.1-8b", [24], TURNS | HALF),
    "8B, 40 GB": ("eagle3-8b", "llama-3.1-8b", [40], TURNS),
    "8B, 80 GB": ("eagle3-8b", "llama-3.1-8b", [80], TURNS),
    "8B, 8 x 80 GB": ("eagle3-8b", "llama-3.1-8b", [80] * 8, {}),
    "8B, 8 x 24 GB": ("eagle3-8b", "llama-3.1-8b", [24] * 8, HALF | PAIRS),
    "30B-A3B, 80 GB": ("eagle3-30b-a3b", "qwen3-30b-a3b", [80], TURNS),
    "70B, 8 x 80 GB": ("eagle3-70b", "llama-3.3-70b", [80] * 8, SPANNED),
    "70B, 8 x 80 GiB": ("eagle3-70b", "llama-3.3-70b", [85] * 8, SPANNED),
    "70B, 3 x 40 GB": ("eagle3-70b", "llama-3.3-70b", [40] * 3, SPANNED | PAIRS | QUARTER),
}


def recipe_of(name: str, plan: str, server: str = "vllm") -> Recipe:
    return load_recipe(name, [f"target={PLANS / plan}", f"data.server={server}", f"data.states_server={server}"])


@pytest.mark.parametrize("case", CASES)
def test_settings_fit_the_gpus(case: str) -> None:
    name, plan, gpus, chosen = CASES[case]
    recipe = recipe_of(name, plan)
    assert fit_to_gpus(recipe, outline(recipe.target.spec), [gb * GB for gb in gpus], (), 10**13) == chosen


def test_without_an_engine_the_target_needs_room_beside_training() -> None:
    recipe = recipe_of("eagle3-8b", "llama-3.1-8b", "null")
    target = outline(recipe.target.spec)
    assert fit_to_gpus(recipe, target, [80 * GB], (), 10**13) == {}
    chosen = fit_to_gpus(recipe, target, [40 * GB], (), 10**13)
    assert chosen["data.states"] == "stored" and chosen["data.batch_size"] < recipe.data.batch_size


def test_a_setting_of_the_user_stays() -> None:
    recipe = recipe_of("eagle3-8b", "llama-3.1-8b")
    target, given = outline(recipe.target.spec), {"data.states", "train.batch_tokens"}
    assert fit_to_gpus(recipe, target, [24 * GB], given, 10**13) == {"train.gradient_checkpointing": True}


def test_stored_states_leave_room_on_the_disk() -> None:
    recipe = recipe_of("eagle3-8b", "llama-3.1-8b")
    assert fit_to_gpus(recipe, outline(recipe.target.spec), [80 * GB], (), 100 * GB)["data.cache_gigabytes"] == 80


def test_checkpointing_is_the_last_resort() -> None:
    recipe = recipe_of("dspark-8b", "llama-3.1-8b")
    target = outline(recipe.target.spec)
    chosen = fit_to_gpus(recipe, target, [40 * GB], (), 10**13)
    assert chosen["train.gradient_checkpointing"] and "train.batch_tokens" not in chosen
    assert training_bytes(recipe, target) > 36 * GB, "it does not fit without"


def fitted(name: str, folder: Path, *overrides: str) -> tuple[Recipe, str]:
    """Return the recipe that a command uses, and its output."""
    console = Console(file=io.StringIO(), width=400)
    recipe = fit_recipe(load_recipe(name, overrides), given_keys(name, overrides), folder, console)
    return recipe, console.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU of 24 GB and vLLM."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(total_memory=24 * GB))
    monkeypatch.setattr("headstart.pipeline.fit.shutil.which", lambda _: "/bin/vllm")


TARGET = f"target={PLANS / 'llama-3.1-8b'}"


@pytest.mark.usefixtures("one_gpu")
def test_a_run_keeps_what_its_first_command_chose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, said = fitted("eagle3-8b", tmp_path / "run", TARGET)
    assert (recipe.data.server, recipe.data.states_server, recipe.eval.engine) == (("vllm",), ("vllm",), "vllm")
    assert (recipe.data.states, recipe.train.batch_tokens, recipe.fit) == ("stored", 8192, False)
    assert said.startswith("Chosen for this machine (1 GPU of 24.0 GB): data.server=vllm, ")
    assert "Hidden states are stored before training." in said
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text(recipe_text(recipe))
    assert fitted(str(tmp_path / "run" / "recipe.yaml"), tmp_path / "run") == (recipe, "")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("headstart.pipeline.fit.shutil.which", lambda _: None)
    for more in ((), ("data.server=auto", "data.states_server=auto", "eval.engine=auto")):
        assert fitted("eagle3-8b", tmp_path / "run", TARGET, *more) == (recipe, "")
    other, _ = fitted("eagle3-8b", tmp_path / "run", TARGET, "train.batch_tokens=512")
    assert other.train.batch_tokens == 512 and other.data == recipe.data


@pytest.mark.usefixtures("one_gpu")
def test_settings_of_a_recipe_file_stay(tmp_path: Path) -> None:
    file = tmp_path / "eagle3-8b.yaml"
    file.write_text("extends: eagle3-8b\ntrain: {batch_tokens: 12000}\n")
    recipe, said = fitted(str(file), tmp_path / "run", TARGET, "data.server=null")
    assert (recipe.train.batch_tokens, recipe.train.gradient_checkpointing) == (12000, True)
    assert (recipe.data.server, recipe.data.states_server, recipe.eval.engine) == (None, None, None)
    assert "batch_tokens" not in said


def test_auto_is_no_engine_where_none_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    recipe, said = fitted("eagle3-8b", tmp_path, TARGET)
    assert (recipe.data.server, recipe.data.states_server, recipe.eval.engine, said) == (None, None, None, "")
    engine = "data.server_command=/some/where/vllm serve"
    recipe, _ = fitted("eagle3-8b", tmp_path, TARGET, engine)
    assert (recipe.data.server, recipe.eval.engine) == (("vllm",), "vllm"), "named by the user"
    recipe, _ = fitted("eagle3-8b", tmp_path, TARGET, engine, "heads={family: hydra, num_heads: 4}")
    assert (recipe.data.server, recipe.eval.engine) == (("vllm",), None), "it cannot serve these heads"


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize(("ranks", "batches"), [(1, 2), (2, 1), (6, 1)])
def test_ranks_share_the_batches_of_a_step(ranks: int, batches: int, tmp_path: Path) -> None:
    console, name = Console(file=io.StringIO()), "eagle3-8b"
    recipe = fit_recipe(load_recipe(name, [TARGET]), given_keys(name, [TARGET]), tmp_path, console, ranks)
    assert (recipe.train.batch_tokens, recipe.train.gradient_accumulation_steps) == (8192, batches)
    kept = "train.gradient_accumulation_steps=5"
    recipe = fit_recipe(load_recipe(name, [TARGET, kept]), given_keys(name, [TARGET, kept]), tmp_path, console, ranks)
    assert recipe.train.gradient_accumulation_steps == 5


@pytest.mark.usefixtures("one_gpu")
def test_an_engine_too_large_for_the_gpus_is_announced(tmp_path: Path) -> None:
    assert "vLLM needs about" not in fitted("eagle3-8b", tmp_path, TARGET)[1]
    assert "vLLM needs about 143.1 GB" in fitted("eagle3-70b", tmp_path, f"target={PLANS / 'llama-3.3-70b'}")[1]


@pytest.mark.usefixtures("one_gpu")
def test_auto_leaves_targets_that_vllm_cannot_extract_from(tmp_path: Path) -> None:
    recipe, _ = fitted("eagle3-8b", tmp_path, f"target={PLANS / 'gemma-3-1b'}")
    assert (recipe.data.server, recipe.data.states_server) == (("vllm",), None)


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize("files", ["quantised", "bin"])
def test_auto_leaves_targets_that_only_loading_describes(files: str, tmp_path: Path) -> None:
    config = json.loads((PLANS / "llama-3.2-1b" / "config.json").read_text())
    if files == "quantised":
        config["quantization_config"] = {"quant_method": "fp8"}
    else:
        (tmp_path / "pytorch_model.bin").touch()
    (tmp_path / "config.json").write_text(json.dumps(config))
    recipe, _ = fitted("eagle3-8b", tmp_path / "run", f"target={tmp_path}")
    assert (recipe.data.server, recipe.data.states_server, recipe.eval.engine) == (None, None, None)
