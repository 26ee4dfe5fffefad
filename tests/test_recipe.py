"""Recipes: overrides, variants, and mistakes answered with what to write instead."""

from __future__ import annotations

import json
import subprocess
import sys
from math import inf
from pathlib import Path

import pytest
import yaml

from headstart.errors import UserError
from headstart.heads.base import make_config
from headstart.heads.settings import Role
from headstart.model.model import Target
from headstart.recipes.recipe import load_recipe, parse_recipe
from headstart.recipes.values import recipe_text, text_to_edit
from tests.tiny import tiny_model


def test_overrides_reach_every_section_and_keep_their_type() -> None:
    overrides = ["train.lr=1e-4", "heads.num_heads=2", "target.dtype=float32", "train.minutes=null", "name=mine"]
    recipe = load_recipe("medusa", overrides)
    assert (recipe.train.lr, recipe.heads.to_recipe()["num_heads"], recipe.target.dtype) == (1e-4, 2, "float32")
    assert (recipe.train.minutes, recipe.name, recipe.target.spec) == (None, "mine", "smollm2-135m")


def test_quotes_make_a_text() -> None:
    overrides = ["train.project='two words'", "target.revision='1e5'", "description=one: two: three"]
    recipe = load_recipe("medusa", overrides)
    assert (recipe.train.project, recipe.target.revision) == ("two words", "1e5")
    assert recipe.description == "one: two: three", "no YAML, so it is a text as it stands"


def test_no_is_a_word_where_a_setting_has_it(tmp_path: Path) -> None:
    """YAML reads it as false."""
    (tmp_path / "mine.yaml").write_text("extends: quickstart\ntrain: {mixed_precision: no}\n")
    recipe = load_recipe(str(tmp_path / "mine.yaml"))
    assert recipe.train.mixed_precision == "no"
    assert load_recipe("quickstart", ["train.mixed_precision=no"]).train.mixed_precision == "no"
    assert parse_recipe(yaml.safe_load(recipe_text(recipe))) == recipe


def test_a_variant_extends_a_recipe(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("extends: quickstart\ntrain: {lr: 0.5}\n")
    recipe, base = load_recipe(str(file)), load_recipe("quickstart")
    assert recipe.name == "mine"
    assert recipe.train.lr == 0.5
    assert recipe.train.model_copy(update={"lr": base.train.lr}) == base.train
    assert recipe.heads == base.heads


def test_a_variant_inherits_the_target(tmp_path: Path) -> None:
    """In either spelling of `target`; settings of one target are not applied to another."""
    base, mine = tmp_path / "base.yaml", tmp_path / "mine.yaml"
    base.write_text("extends: quickstart\ntarget: some/model\n")
    mine.write_text(f"extends: {base}\ntarget: {{dtype: float32, revision: v1, trust_remote_code: true}}\n")
    target = load_recipe(str(mine)).target
    assert (target.spec, target.dtype, target.revision) == ("some/model", "float32", "v1")
    other = tmp_path / "other.yaml"
    other.write_text(f"extends: {mine}\ntarget: another/model\n")
    for recipe in (
        load_recipe(str(other)),
        load_recipe(str(mine), ["target=another/model"]),
        load_recipe(str(mine), ["target.dtype=float32", "target=another/model"]),
    ):
        target = recipe.target
        assert (target.spec, target.dtype, target.revision) == ("another/model", "float32", None)
        assert not target.trust_remote_code, "trust is given per target"
    assert load_recipe(str(mine), ["target=some/model"]).target.revision == "v1"


def test_the_dial_turns_in_what_headstart_wrote_too(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text_to_edit(load_recipe("quickstart", ["train.minutes=7", "name=mine"])))
    assert load_recipe(str(file)) == load_recipe("quickstart", ["train.minutes=7", "name=mine"])
    longer = load_recipe("quickstart", ["minutes=60", "train.minutes=7", "name=mine"])
    assert load_recipe(str(file), ["minutes=60"]) == longer
    file.write_text(file.read_text().replace("minutes: 25.0", "minutes: 60"))
    assert load_recipe(str(file)) == longer
    file.write_text(recipe_text(load_recipe("quickstart", ["train.minutes=7", "name=mine"])))
    assert "cache_gigabytes" in file.read_text(), "a run's recipe is written in full"
    assert load_recipe(str(file), ["minutes=60"]) == longer
    assert load_recipe(str(file), ["data.minutes=12.64", "minutes=60"]).data.minutes == 12.64


def test_another_family_leaves_the_settings_of_the_first_behind(tmp_path: Path) -> None:
    wanted = {
        "family": "eagle",
        "draft_steps": 2,
        "embedding_norm": True,
        "init": "target",
        "draft_vocab_size": 8192,
    }  # the last is common to all
    assert load_recipe("medusa", ["heads.draft_steps=2", "heads.family=eagle"]).heads.to_recipe() == wanted
    file = tmp_path / "other.yaml"
    file.write_text("extends: medusa\nheads: {family: eagle, draft_steps: 2}\n")
    assert load_recipe(str(file)).heads.to_recipe() == wanted
    assert load_recipe("medusa", ["heads.family=medusa"]).heads.to_recipe()["num_heads"] == 4, "the same family"


def test_a_path_in_extends_is_relative_to_its_file(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("extends: quickstart\ntrain: {lr: 0.5}\n")
    (tmp_path / "variant.yaml").write_text("extends: base.yaml\ntrain: {max_grad_norm: 0.25}\n")
    train = load_recipe(str(tmp_path / "variant.yaml")).train
    assert (train.lr, train.max_grad_norm) == (0.5, 0.25)
    (tmp_path / "lost.yaml").write_text("extends: bse.yaml\n")
    with pytest.raises(UserError, match=r"No recipe 'bse\.yaml' \(extended by .*lost\.yaml\)"):
        load_recipe(str(tmp_path / "lost.yaml"))


def test_a_recipe_needs_heads(tmp_path: Path) -> None:
    (tmp_path / "bare.yaml").write_text("train: {lr: 0.5}\n")
    with pytest.raises(UserError, match=r"The recipe has no 'heads'\..*extends: quickstart"):
        load_recipe(str(tmp_path / "bare.yaml"))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.lrr=1", r"Unknown recipe key 'train\.lrr'\. Did you mean 'lr'"),
        ("trian.lr=1", r"Unknown recipe key 'trian'\. Did you mean 'train'"),
        ("lr=1", r"Unknown recipe key 'lr'\. Did you mean 'train\.lr'"),
        ("train.conversations=9", r"Unknown recipe key 'train\.conversations'\. Did you mean 'data\.conversations'"),
        ("train.lr=-1", r"Recipe key 'train\.lr' is -1: .*greater than 0"),
        ("train.lr", r"'train\.lr' is not an override"),
        ("name=../../evil", r"'name' is '\.\./\.\./evil'\. Write the name of one folder"),
        ("name=..", r"'name' is '\.\.'"),
        ("name.sub=1", "has no settings inside"),
        ("train.lr.peak=1", r"'train\.lr' in 'train\.lr\.peak=1' has no settings inside\. Write train\.lr=value\."),
        (
            "data.server.url=http://a:1",
            r"'data\.server' has \{'url': 'http://a:1'\}\. Write vllm or",
        ),
        ("data.server_arguments='-tp 2'", r"data\.server_arguments is for an engine that the run starts\. Set data"),
        ("data.server=banana", r"'data\.server' has 'banana'\. Write vllm or llama.cpp or auto, an address"),
        ("train.minutes=", r"'train\.minutes=' gives 'train\.minutes' no value\. .*or train\.minutes=null"),
        ("train.lr=1e400", r"'train\.lr' is inf: input should be a finite number"),
        ("train.minutes=.inf", r"'train\.minutes' is inf: input should be a finite number"),
        ("train.max_grad_norm=.nan", r"'train\.max_grad_norm' is nan: input should be greater than 0"),
        ("train.betas=[0.9, 1.0]", r"'train\.betas\.1' is 1\.0: input should be less than 1"),
        ("train.loss=softce", r"'train\.loss' is 'softce': input should be 'soft_ce', 'hard_ce', 'tv_ce' or 'half_l1'"),
        ("train.mixed_precision=yes", r"'train\.mixed_precision' is True: input should be 'auto', 'no', 'bf16' or"),
        ("train.seed=-1", r"'train\.seed' is -1: input should be greater than or equal to 0"),
        ("tune.widths=[]", r"'tune\.widths' is \[\]: .* at least 1 item"),
        ("tune.widths=[1,0]", r"'tune\.widths\.1' is 0: input should be greater than or equal to 1"),
        ("tune.max_nodes=1e9", r"'tune\.max_nodes' is 1000000000\.0: input should be less than or equal to 1024"),
        ("data.batch_size=1e9", r"'data\.batch_size' is 1000000000\.0: input should be less than .* 100000"),
        ("heads.family=medsua", r"Unknown head family 'medsua'\. Did you mean 'medusa'"),
        ("heads.num_layer=2", r"medusa heads have no setting 'num_layer'\. Did you mean 'num_layers'"),
        (
            "heads.aux_norms=true",
            r"medusa heads have no setting 'aux_norms'\. 'aux_norms' is a setting of eagle3 and peagle\. medusa has",
        ),
        ("heads.block_sise=4", r"'block_size' is a setting of dflash and dflash2 and dspark\."),
        ("heads.hidden_size=7.5", r"medusa heads have no setting 'hidden_size'\."),
        ("heads.num_heads=40", r"'heads\.num_heads' is 40: input should be less .*headstart recipes show medusa --all"),
        ("heads=medusa", "Recipe key 'heads' is 'medusa'"),
        ("target=5", "Recipe key 'target' is 5"),
        ("data=5", "Recipe key 'data' is 5"),
    ],
)
def test_mistakes_are_answered(override: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_recipe("medusa", [override])


def test_an_infinite_gradient_limit_survives_being_written() -> None:
    recipe = load_recipe("medusa", ["train.max_grad_norm=.inf"])
    assert recipe.train.max_grad_norm == inf
    assert parse_recipe(yaml.safe_load(recipe_text(recipe))) == recipe
    assert json.loads(json.dumps(recipe.train.of_role(Role.CONTENT)))["max_grad_norm"] == inf


@pytest.mark.parametrize(
    ("heads", "problem"),
    [
        ({"family": "hydra", "num_headss": 3}, r"hydra heads have no setting 'num_headss'. Did you mean 'num_heads'\?"),
        (
            {"family": "peagle", "feedback": "post_norm"},
            r"peagle heads have no setting 'feedback'\. 'feedback' is a setting of eagle3\.",
        ),
        ({"family": "eagle", "init": "hot"}, r"'heads.init' is 'hot'"),
        ({"family": "eagle3", "aux_layers": [2, 2]}, r"layers \[2, 2\] of the target, which must be different"),
    ],
)
def test_settings_of_heads_are_checked_before_any_target_is_loaded(heads: dict[str, object], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        parse_recipe({"name": "mine", "heads": heads})


def test_settings_from_the_target_are_left_open_unless_set() -> None:
    recipe = load_recipe("eagle", ["heads.hidden_act=silu", "heads.draft_vocab_size=0"])
    written = yaml.safe_load(recipe_text(recipe))
    assert written["heads"]["hidden_act"] == "silu", "said, though it is the default of targets that have none"
    assert not {"head_dim", "aux_layers", "hidden_size"} & written["heads"].keys()
    assert parse_recipe(written) == recipe
    assert make_config(recipe.heads, Target(tiny_model("gemma2", vocab_size=61))).model_dump()["hidden_act"] == "silu"


@pytest.mark.parametrize("settings", [{"family": "eagle3"}, {"family": "dflash", "mask_token_id": 5}])
def test_missing_aux_layers_are_refused_with_the_valid_range(settings: dict[str, object], target: Target) -> None:
    last = target.num_layers - (settings["family"] == "dflash")
    assert make_config(parse_recipe({"name": "a", "heads": {**settings, "aux_layers": [1, last]}}).heads, target)
    heads = parse_recipe({"name": "a", "heads": {**settings, "aux_layers": [1, last + 1]}}).heads
    with pytest.raises(UserError, match=rf"layers \[1, {last + 1}\] of the target.* from 1 to {last}\."):
        make_config(heads, target)


@pytest.mark.parametrize(
    ("text", "said"), [("a: [1", "not valid YAML"), ("- 1", "holds no settings"), ("extends: SELF", "extends itself")]
)
def test_files_that_are_no_recipes_are_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text.replace("SELF", str(file)))
    with pytest.raises(UserError, match=said):
        load_recipe(str(file))


def test_an_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"No recipe 'quickstrat'\. Did you mean 'quickstart'"):
        load_recipe("quickstrat")


def test_reading_recipes_loads_no_model_library() -> None:
    """`headstart recipes` answers at once; the families are asked when settings are checked."""
    code = (
        "import sys; from headstart.recipes.values import read_values; read_values('eagle3', ['heads.family=hydra']);"
        "print(*sys.modules)"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "headstart.recipes.values" in loaded
    assert not {"torch", "transformers"} & set(loaded)


@pytest.mark.parametrize(
    ("minutes", "expected"),
    [
        (1, (0.45, 405, 4, 0.32, 10)),
        (12, (5.45, 4905, 4, 3.95, 10)),
        (25, (12.64, 11376, 7.58, 9.16, 20)),
        (180, (101.01, 90909, 60.61, 73.15, 64)),
    ],
)
def test_minutes_scale_writing_training_and_report(minutes: int, expected: tuple[float, ...]) -> None:
    recipe = load_recipe("quickstart", [f"minutes={minutes}"])
    data, train = recipe.data, recipe.train

    assert (data.minutes, data.conversations, data.cache_gigabytes, train.minutes, recipe.eval.limit) == expected
    rest = minutes - recipe.data.minutes - recipe.train.minutes
    assert rest >= min(0.22 * minutes, 1.9 + 0.06 * recipe.eval.limit), "loading, tuning and the report take some"
    assert parse_recipe(recipe.model_dump(mode="json")) == recipe, "a recipe with everything filled in is read the same"


def test_explicit_settings_override_the_minutes() -> None:
    given = ["minutes=120", "train.minutes=null", "data.conversations=50", "data.cache_gigabytes=2"]
    recipe = load_recipe("quickstart", given)

    assert (recipe.train.minutes, recipe.data.conversations, recipe.data.minutes) == (None, 50, 66.21)
    assert recipe.data.cache_gigabytes == 2


def test_conversations_follow_explicit_writing_minutes() -> None:
    data = load_recipe("quickstart", ["minutes=12", "data.minutes=66.21"]).data
    assert data == load_recipe("quickstart", ["minutes=120"]).data
    assert load_recipe("quickstart", ["minutes=12", "data.minutes=null"]).data.conversations == 4905
    with pytest.raises(UserError, match=r"'data\.minutes' is -1"):
        load_recipe("quickstart", ["data.minutes=-1"])


@pytest.mark.parametrize("minutes", [0.01, 1e-6])
def test_very_few_minutes_leave_some_for_each(minutes: float) -> None:
    recipe = load_recipe("quickstart", [f"minutes={minutes}"])

    assert recipe.data.minutes == recipe.train.minutes == 0.01 and recipe.data.conversations >= 1


@pytest.mark.parametrize("minutes", ["0", "-1", ".inf", "soon"])
def test_minutes_that_are_none_are_refused(minutes: str) -> None:
    with pytest.raises(UserError, match="'minutes' is"):
        load_recipe("quickstart", [f"minutes={minutes}"])


def test_another_target_leaves_the_settings_of_the_first_behind(tmp_path: Path) -> None:
    """Unless the same level sets them."""
    heads = load_recipe("dspark-1b", ["target=Qwen/Qwen3-1.7B"]).heads.to_recipe()
    assert not {"mask_token_id", "aux_layers"} & heads.keys() and heads["markov_rank"] == 256
    assert "aux_layers" not in load_recipe("dspark-8b", ["target.spec=Qwen/Qwen3-8B"]).heads.to_recipe()
    assert "hidden_act" not in load_recipe("gemma-3-1b", ["target=Qwen/Qwen3-1.7B"]).heads.to_recipe()
    assert load_recipe("qwen3-4b", ["target=google/gemma-3-1b-it"]).data.chat_template_kwargs == {}
    for order in (1, -1):
        said = ["target=Qwen/Qwen3-1.7B", "heads.mask_token_id=9", "target.revision=v1"][::order]
        recipe = load_recipe("dspark-1b", said)
        assert (recipe.heads.to_recipe()["mask_token_id"], recipe.target.revision) == (9, "v1")
    file = tmp_path / "mine.yaml"
    file.write_text("extends: dspark-1b\ntarget: Qwen/Qwen3-1.7B\nheads: {aux_layers: [1, 2]}\n")
    mine = load_recipe(str(file)).heads.to_recipe()
    assert mine["aux_layers"] == [1, 2] and "mask_token_id" not in mine
    file.write_text(recipe_text(load_recipe("dspark-1b")))
    assert "mask_token_id" not in load_recipe(str(file), ["target=x/y"]).heads.to_recipe(), "written in full, too"
    assert load_recipe("dspark-70b").heads.to_recipe()["mask_token_id"] == 128002


def test_other_prompts_leave_the_split_of_the_first_behind(tmp_path: Path) -> None:
    base = load_recipe("eagle3-8b").data
    assert base.split == "train_sft"
    assert load_recipe("eagle3-8b", [f"data.prompts={base.prompts}"]).data.split == "train_sft"
    assert load_recipe("eagle3-8b", ["data.prompts=tatsu-lab/alpaca"]).data.split == "train"
    assert load_recipe("eagle3-8b", ["data.split=test", "data.prompts=tatsu-lab/alpaca"]).data.split == "test"
    file = tmp_path / "mine.yaml"
    file.write_text("extends: eagle3-8b\ndata: {prompts: a/b, revision: v1}\n")
    assert (load_recipe(str(file)).data.split, load_recipe(str(file)).data.revision) == ("train", "v1")
    file.write_text("extends: eagle3-8b\ndata: {prompts: [a/b, {source: self, weight: 2}]}\n")
    assert load_recipe(str(file)).data.split == "train"


def test_minutes_of_a_variant_are_shared_anew(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(recipe_text(load_recipe("quickstart")))
    (tmp_path / "mine.yaml").write_text("extends: run.yaml\nname: quickstart\nminutes: 60\n")
    assert load_recipe(str(tmp_path / "mine.yaml")) == load_recipe("quickstart", ["minutes=60"])


def test_a_single_value_is_a_list_of_one(tmp_path: Path) -> None:
    said = ["export.formats=vllm", "eval.compare=ngram", "tune.widths=4", "data.exclude=a.jsonl"]
    recipe = load_recipe("eagle3", [*said, "heads.aux_layers=3", "data.prompts={source: a/b, split: c}"])
    assert (recipe.export.formats, recipe.eval.compare, recipe.tune.widths) == (("vllm",), ("ngram",), (4,))
    assert (recipe.data.exclude, recipe.heads.to_recipe()["aux_layers"]) == (("a.jsonl",), [3])
    assert [(source.source, source.split) for source in recipe.data.sources] == [("a/b", "c")]
    file = tmp_path / "mine.yaml"
    file.write_text("extends: eagle3\nname: eagle3\nexport: {formats: vllm}\ntune: {widths: 4}\n")
    assert load_recipe(str(file)) == load_recipe("eagle3", ["export.formats=[vllm]", "tune.widths=[4]"])
    file.write_text("extends: eagle3\ndata: 5\nheads: x\n")
    with pytest.raises(UserError, match="'data' is 5"):
        load_recipe(str(file), ["target=x/y"])
    with pytest.raises(UserError, match=r"'train\.betas' is 0\.9"):
        load_recipe("eagle3", ["train.betas=0.9"])  # a pair
