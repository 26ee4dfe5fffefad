"""Replacements for printed words, and the printed commands that are not run: a test covers them, or a reason is given.

The parts of `rehearse` list the commands that are run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

RECIPES = ("eagle3-8b", "eagle3-70b", "quickstart", "hydra")
"""Packaged recipes that commands name; each becomes a recipe file that extends it, at toy size."""

TOY_SIZES: dict[str, dict[str, Any]] = {
    "data": {
        "conversations": 16, "heldout": 2, "validation": 4, "max_prompt_tokens": 384, "max_new_tokens": 24,
        "batch_size": 8, "cache_gigabytes": 1, "server": None, "states_server": None,
    },
    "heads": {"draft_vocab_size": 128},
    "train": {"steps": 24, "epochs": 1000, "batch_tokens": 512, "eval_every": 5, "save_every": 1000},
    "tune": {"widths": [1, 4], "context": 64, "max_nodes": 4, "max_rank": 2},
    "eval": {"limit": 2, "max_new_tokens": 16, "engine": None},
}  # fmt: skip
"""Settings of the toy recipes, without engines."""

PORTS = ("8000", "8080", "29500")
"""Ports that pages print; each is replaced by a free one of this machine."""

SUBSTITUTIONS = (
    # printed, replacement: {words} are paths of the rehearsal
    (".venv/bin/headstart", "headstart"),
    *((recipe, "{recipes}/" + recipe + ".yaml") for recipe in RECIPES),
    ("eagle3-8b --run-dir runs/eight", "{recipes}/eagle3-8b.yaml data.server=auto data.states_server=auto "
     "eval.engine=auto --run-dir runs/eight --processes 2"),
    ("RECIPE", "{recipes}/eagle3-8b.yaml"),
    ("[key=value ...]", "train.seed=0"),
    # models
    ("meta-llama/Llama-3.1-8B-Instruct", "{toy}"),
    ("HuggingFaceTB/SmolLM2-360M-Instruct", "{target}"),
    ("path/to/model", "{target}"),
    ("TARGET.gguf", "{gguf}"),
    ("TARGET", "{target}"),
    # machines: two nodes of two processes are addresses of this one
    ("http://node1:", "http://127.0.0.1:"),
    ("--main_process_ip node1", "--main_process_ip 127.0.0.1"),
    ("node:runs/", "node/runs/"),
    ("/shared/", "{place}/shared/"),
    ("--data-parallel-size 8", "--data-parallel-size 1"),
    ("--tensor-parallel-size 4", "--tensor-parallel-size 1"),
    ("--nproc-per-node 8", "--nproc-per-node 2"),
    ("--ntasks-per-node 8", "--ntasks-per-node 2"),
    ("--ntasks-per-node=8", "--ntasks-per-node=2"),
    ("--num_processes 8", "--num_processes 2"),
    ("--num_processes 16", "--num_processes 4"),
    ("$((8 *", "$((2 *"),
    # examples
    ("recipe.yaml", "{recipes}/own_model.yaml"),
    ("client.py", "{examples}/vllm/client.py --server http://localhost:8000"),
    # sizes
    ("sleep 10", "sleep 1"),
    ("--max-model-len 8192", "--max-model-len 128"),
    ("data.batch_size=4096", "data.batch_size=8"),
    ("headstart audit", "headstart audit --limit 2 --samples 10"),
    ("data.conversations=4000", "data.conversations=16"),
    ("headstart serve runs/mine", "headstart serve runs/mine --port 8000"),
    # engines
    ("--out DIR --engine vllm", "--out out/engine --limit 4 --max-new-tokens 8 --engine  vllm"),
    ("--engine vllm", "--engine vllm {tuning}"),
    ("--engine-command ~/llama.cpp/build/bin/llama-server", "{tuning} {tuning_llama}"),
    # placeholders for the reader
    ("export RUN --format vllm --out FOLDER", "export runs/eagle3-70b --format vllm --out served"),
    ("RUNS/heads", "{place}/shared/runs/heads"),
    ("RUN", "runs/quickstart"),
    ("HEADS", "runs/quickstart"),
    ("FOLDER", "served"),
    ("PATH", "runs/quickstart"),
    ("FILE.jsonl", "{place}/questions.jsonl"),
    ("validation.jsonl", "runs/mine/data/conversations/validation.jsonl"),
    ("TEXT", "'Tell me about rice.'"),
    ("--out DIR", "--out out"),
    ("--from DIR", "--from out"),
    ("DIR", "served"),
)  # fmt: skip

_TESTED: dict[str, dict[str, tuple[str, ...]]] = {
    "tests/test_zoo.py": {
        "test_pages_are_up_to_date": (
            "headstart plan qwen3-0.6b target=docs/plans/qwen3-0.6b",
            "headstart plan eagle3-8b target=docs/plans/llama-3.1-8b data.server=",
            "headstart plan eagle3-8b target=docs/plans/llama-3.1-8b data.conversations=",
            "headstart plan eagle3-70b target=docs/plans/llama-3.3-70b",
            "headstart plan eagle3-70b target=docs/plans/qwen3-coder-480b",
        )
    },
    "tests/engines/test_audit_engine.py": {
        "test_named_engine_is_started_with_the_heads": ("headstart audit runs/mine --engine vllm",),
        "test_honest_engine_is_clean_at_every_load": ("headstart audit runs/mine --engine http://localhost:8000",),
    },
    "tests/drafters/test_memory.py": {
        "test_answers_are_remembered_for_calls_and_processes": (
            ".venv/bin/headstart chat runs/quickstart --drafter heads+ngram+memory",
        )
    },
    "tests/test_cli_heads.py": {
        "test_a_target_with_modules_of_its_own_needs_no_heads": (".venv/bin/headstart chat zai-org/GLM-4.5-Air",),
        "test_audit_ends_clean_and_leaves_evidence": (
            ".venv/bin/headstart audit runs/quickstart/heads --out",
            ".venv/bin/headstart audit runs/quickstart/heads --questions",
        ),
        "test_eval_compares": (
            ".venv/bin/headstart eval runs/quickstart/heads --questions QUESTIONS.jsonl",
            "headstart eval HEADS --questions FILE.jsonl --out DIR --sweep-batch 8",
        ),
        "test_every_drafter_and_mode_writes_the_same_words": (
            '.venv/bin/headstart generate runs/quickstart --prompt "Name five fruits."',
        ),
    },
    "tests/serve/test_serve.py": {"test_the_command": ("headstart serve HEADS",)},
    "tests/test_cli_race.py": {"test_a_race_decodes_both_ways": (".venv/bin/headstart race runs/quickstart --prompt",)},
    "tests/data/test_served.py": {
        "test_decoder_logs_answers_without_text": ("from headstart import load",),
    },
    "tests/test_adapt.py": {
        "test_chat_logs_and_follows": ("headstart chat runs/quickstart/adapt/heads --log",),
        "test_a_log_is_described_and_deleted": (
            "headstart adapt log runs/quickstart --log traffic",
            "headstart adapt log runs/quickstart --log traffic --delete",
            "headstart adapt log RUN --log FOLDER --delete",
        ),
        "test_watch_goes_on_after_sigkill": ("headstart adapt watch runs/quickstart", "headstart adapt watch RUN"),
        "test_the_steps_are_commands": ("headstart adapt train RUN", "headstart adapt gate RUN"),
        "test_acceptance_identifies_served_heads": ("headstart adapt engine runs/quickstart",),
        "test_one_command_goes_back_and_another_swaps": (
            "headstart adapt swap RUN",
            "headstart adapt back RUN",
            "headstart adapt report RUN",
            "headstart adapt report runs/quickstart",
        ),
    },
    "tests/test_examples.py": {
        "test_the_serving_example_logs_requests_with_their_users": ("python serve.py requests.jsonl",)
    },
    "tests/test_adapted_runs.py": {
        "test_heads_for_a_target_with_an_adapter": ("headstart run quickstart target.adapter=",),
    },
    "tests/hub/test_adapter.py": {
        "test_engines_need_the_merged_model": ("headstart export HEADS --format vllm --target merged",),
        "test_loading_finds_the_adapter_beside_the_heads": ('headstart generate runs/mine --prompt "Why',),
    },
    "tests/test_base_target.py": {"test_a_run_from_texts_to_the_report": ("headstart generate --raw",)},
    "tests/test_recipe.py": {
        "test_minutes_scale_writing_training_and_report": ("headstart run quickstart minutes=60",)
    },
    "tests/test_cli.py": {
        "test_recipes_are_listed_and_shown": ("headstart recipes show medusa-8b > mine.yaml",),
        "test_run_ends_with_the_table_and_the_paths": ("headstart run mine.yaml",),
    },
    "tests/doctor/test_broken.py": {
        "test_the_command_logs_each_step_and_finds_nothing_wrong": ("headstart doctor runs/quickstart",),
        "test_heads_in_a_run_are_examined_with_it": ("headstart doctor runs/quickstart/heads",),
        "test_a_recipe_without_a_run": ("headstart doctor quickstart --run-dir",),
        "test_a_check_of_ones_own_is_one_function": ("from headstart.doctor.examination import",),
    },
    "tests/doctor/test_planted.py": {
        "test_questions_that_the_data_do_not_cover": ("headstart doctor user/name --questions",)
    },
    "tests/test_generation.py": {
        "test_a_folder_of_heads": ("from transformers import AutoModelForCausalLM", "model.generate(**inputs")
    },
    "tests/test_pipeline.py": {
        "test_longer_training_continues_and_keeps_the_shorter": ("headstart run quickstart train.minutes=14",),
        "test_more_conversations_are_appended": ("headstart run quickstart data.minutes=18",),
        "test_gc_frees_only_unreferenced_artifacts": ("headstart gc --dry-run",),
    },
    "tests/test_states_budget.py": {"test_the_command": ("headstart gc --states-gigabytes 200",)},
    "tests/train/test_low_rank.py": {
        "test_every_family_learns_updates_of_this_rank_alone": ("headstart run adapt train.start_from=",),
    },
    "tests/test_recipe_docs.py": {"test_the_page_matches_the_schema": ("headstart recipes docs > docs/recipes.md",)},
    "tests/test_figures.py": {"test_a_page_that_differs_is_named": ("python benchmarks/render.py",)},
    "tests/test_benchmarks.py": {
        "test_record_converts_a_report": ("python benchmarks/record.py",),
        "test_families": (".venv/bin/python benchmarks/families.py",),
        "test_never_slower": (".venv/bin/python benchmarks/never_slower.py",),
        "test_busy_core": (".venv/bin/python benchmarks/busy_core.py",),
        "test_one_command": (".venv/bin/python benchmarks/one_command.py",),
    },
    "tests/test_on_gpu.py": {"test_every_section_at_toy_size": (".venv/bin/python benchmarks/on_gpu.py",)},
    "tests/heads/test_new_family.py": {
        "test_a_toy_family_keeps_the_whole_contract": (
            "cp examples/linear.py src/headstart/heads/",
            '"linear": {"family": "linear"',
            "headstart run quickstart heads.family=linear",
        )
    },
    "tests/eval/test_diff.py": {
        "test_exit_code_reports_a_regression": (
            "headstart report diff BASE OTHER",
            "headstart report diff runs/before runs/after",
        ),
        "test_page_shows_all_reports": ("headstart report diff before after another",),
    },
    "tests/test_leaderboard.py": {
        "test_entries_and_their_broken_rules": ("python benchmarks/leaderboard.py quickstart minutes=60",)
    },
    "tests/heads/test_native.py": {
        "test_the_contract_of_families_is_kept": ("headstart run mtp target=zai-org/GLM-4.5-Air heads.init=native",)
    },
    "tests/data/test_suites.py": {
        "test_local_copy_is_asked_turn_by_turn": ("headstart eval runs/quickstart --suite mt-bench",),
    },
    "tests/engines/test_into_checkpoint.py": {
        "test_command_prints_how_to_serve_the_copy": ("headstart export runs/native --format checkpoint",)
    },
    "tests/hub/test_hub.py": {"test_pushed_heads_come_back_and_decode": ("headstart push HEADS user/name",)},
    "tests/engines/test_sharing.py": {"test_two_formats_one_repository": ("headstart push served user/name",)},
}
TESTED = {text: f"{file}::{test}" for file, tests in _TESTED.items() for test, texts in tests.items() for text in texts}
"""Beginnings of commands, and the test that does what each says."""

_NAME = "the name of a command"
NOT_RUN = {
    "make quickstart": "25 minutes of installing and training: `.ci/run` installs and runs the same recipe at toy size",
    "make quickstart PYTHON=python3.12": "as `make quickstart`, with another interpreter",
    "make test": "the tests themselves; `.ci/run` runs them",
    "make docs": "the site; `.ci/run` builds it",
    "make check": "static checks; `.ci/run` runs them",
    ".ci/run": "runs the tests and this rehearsal",
    "make rehearsal": "the rehearsal itself",
    "make coverage": "the tests, counted",
    "pip install -c constraints.txt '.[serve]'": "installs from an index; the quickstart has the same packages",
    "pip install -c constraints.txt '.[gguf]'": "installs from an index; tests/test_wheel.py installs the wheel",
    "pip install torchao": "installs from an index; tests/model/test_quantized.py needs it",
    "headstart run qwen3-0.6b": "downloads its target; tests/test_zoo.py tries the recipe on a tiny model",
    "python -m headstart.train RECIPE": "started by `headstart train RECIPE` and by launchers, which are run",
    "python -m headstart.train RECIPE train.gradient_accumulation_steps=2": "goes on from what torchrun began, and "
    "tests/train/test_ranks.py trains so",
    "headstart tune HEADS --quantization int8": "needs torchao; tests/model/test_quantized.py decodes so",
    "headstart run quickstart train.lr=3e-4": "an override among many: tests/test_recipe.py reads them",
    "headstart eval HEADS --questions FILE": "`headstart eval HEADS` is run with a whole file name",
    "python -m sglang.launch_server": "SGLang needs a GPU; the page notes that it was not run",
    "vllm serve served": "needs a target that ships a module; the page notes that it was not run",
    "pip install 'headstart[gguf]'": "installs from an index; `make rehearsal` installs the same extra",
    "python -m vllm.entrypoints.openai.api_server --model TARGET": "the rehearsal's own `vllm`, if vLLM is installed",
    "convert_hf_to_gguf.py served": "a script of llama.cpp for DFlash and DSpark heads, and `served` holds EAGLE-3's",
    "headstart tune --engine vllm": _NAME,
    "headstart adapt": _NAME,
    "srun --gpus-per-task 1": "an option of srun, named",
    "accelerate launch": "the name of a launcher",
    **{f"headstart {name}": _NAME for name in (
        "plan", "tune", "audit", "export", "import", "eval", "data build", "run", "train", "doctor", "generate", "race",
        "chat", "serve", "push", "report diff", "eval --compare", "gc --states-gigabytes N", "export --format NAME",
        "recipes show NAME --all", "run quickstart",
    )},
    **dict.fromkeys(("headstart tune --engine", "headstart export --check"), _NAME),
    "headstart audit --questions FILE.jsonl": "`headstart audit HEADS` is run; its heads are left out in the sentence",
}  # fmt: skip
"""Commands that are neither run nor tested, and why."""


def toy(text: str, words: Mapping[str, str]) -> str:
    """Replace printed words by toy words; `words` fill the braces of `SUBSTITUTIONS`, and are ports.

    A word is replaced where it stands alone: not in `runs/quickstart`, and not as a variable's name.

    >>> toy('headstart train RECIPE --run-dir runs/RECIPE # $TARGET', {"recipes": "r"})
    'headstart train r/eagle3-8b.yaml --run-dir runs/RECIPE # $TARGET'
    >>> toy("curl http://localhost:8000/metrics", {"8000": "40123"})
    'curl http://localhost:40123/metrics'
    """
    known = dict(SUBSTITUTIONS)
    alone = [_alone(printed) for printed in sorted(known, key=len, reverse=True)]

    def instead(match: re.Match[str]) -> str:
        return re.sub(r"\{(\w+)\}", lambda name: words[name[1]], known[match[0]])

    return re.sub(rf"\b({'|'.join(PORTS)})\b", lambda port: words[port[0]], re.sub("|".join(alone), instead, text))


def _alone(printed: str) -> str:
    """Return a pattern of the printed words that does not match inside longer words."""
    before = r"(?<![\w$./-])" if printed[0].isalnum() else r"(?<![\w-])"
    after = r"(?![\w=.,/-])" if printed[-1].isalnum() else ""
    return before + re.escape(printed) + after
