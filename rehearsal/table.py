"""What is put in the place of printed words, and which printed commands are not run: they have a test, or a reason.

Which commands are run, the parts of `rehearse` say.
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
        "batch_size": 8, "cache_gigabytes": 1,
    },
    "heads": {"draft_vocab_size": 128},
    "train": {"steps": 24, "epochs": 1000, "batch_tokens": 512, "eval_every": 5, "save_every": 1000},
    "tune": {"widths": [1, 4], "context": 64, "max_nodes": 4, "max_rank": 2},
    "eval": {"limit": 2, "max_new_tokens": 16},
}  # fmt: skip
"""Settings of the toy recipes."""

SUBSTITUTIONS = (
    # printed, in its place: {words} are paths of the rehearsal
    (".venv/bin/headstart", "headstart"),
    *((recipe, "{recipes}/" + recipe + ".yaml") for recipe in RECIPES),
    ("RECIPE", "{recipes}/eagle3-8b.yaml"),
    ("[key=value ...]", "train.seed=0"),
    # models
    ("meta-llama/Llama-3.1-8B-Instruct", "{toy}"),
    ("HuggingFaceTB/SmolLM2-360M-Instruct", "{target}"),
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
    # sizes
    ("sleep 10", "sleep 1"),
    ("--max-model-len 8192", "--max-model-len 128"),
    ("data.batch_size=4096", "data.batch_size=8"),
    ("data.conversations=4000", "data.conversations=16"),
    # engines
    ("--engine vllm", "--engine vllm {tuning}"),
    ("--engine-command ~/llama.cpp/build/bin/llama-server", "{tuning} {tuning_llama}"),
    ('"kv_connector": "ExampleHiddenStatesConnector"', '"kv_connector": {connector}'),
    # what a reader is to name
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

_PLANS = "tests/test_plan.py::test_the_page_on_scaling_says_what_plans_say"
_MODULES = "tests/test_cli_heads.py::test_a_target_with_modules_of_its_own_needs_no_heads"
_DIFF = "tests/eval/test_diff.py::test_the_exit_code_says_whether_it_fell"
_NATIVE = "tests/engines/test_into_checkpoint.py::test_the_command_says_what_serves_the_copy"
TESTED = {
    "headstart plan eagle3-8b target=docs/plans/llama-3.1-8b data.server=": _PLANS,
    "headstart plan eagle3-8b target=docs/plans/llama-3.1-8b data.conversations=": _PLANS,
    "headstart plan eagle3-70b target=docs/plans/llama-3.3-70b": _PLANS,
    "headstart plan eagle3-70b target=docs/plans/qwen3-coder-480b": _PLANS,
    "headstart report diff BASE OTHER": _DIFF,
    "headstart report diff runs/before runs/after": _DIFF,
    "headstart report diff before after another": "tests/eval/test_diff.py::test_the_page_has_all_reports",
    "headstart eval runs/quickstart --suite mt-bench": "tests/data/test_suites.py::test_a_copy_is_asked_turn_by_turn",
    ".venv/bin/headstart chat zai-org/GLM-4.5-Air": _MODULES,
    "headstart export runs/native --format checkpoint": _NATIVE,
    "model.generate(**inputs": "tests/test_generation.py::test_a_folder_of_heads",
    "headstart push HEADS user/name": "tests/hub/test_hub.py::test_pushed_heads_come_back_and_decode",
    "headstart push served user/name": "tests/engines/test_sharing.py::test_two_formats_in_one_repository",
}
"""Beginnings of commands, and the test that does what each says."""

_NAME = "the name of a command"
NOT_RUN = {
    "make quickstart": "25 minutes of installing and training: `.ci/run` installs and runs the same recipe at toy size",
    "make quickstart PYTHON=python3.12": "as `make quickstart`, with another interpreter",
    "make test": "the tests themselves; `.ci/run` runs them",
    "python -m sglang.launch_server": "SGLang needs a GPU, and the page says that it was not run",
    "vllm serve served": "needs a target that ships a module, and the page says that it was not run",
    "pip install 'headstart[gguf]'": "installs from an index; `make rehearsal` installs the same extra",
    "python -m vllm.entrypoints.openai.api_server --model TARGET": "what the rehearsal's `vllm` is, where vLLM is real",
    "convert_hf_to_gguf.py served": "a script of llama.cpp for DFlash and DSpark heads, and `served` holds EAGLE-3's",
    "headstart tune runs/mine --engine vllm": "with an engine's arguments it is printed in docs/serving.md, and run",
    "srun --gpus-per-task 1": "an option of srun, named",
    "accelerate launch": "the name of a launcher",
    **{f"headstart {name}": _NAME for name in ("plan", "tune", "audit", "export", "import", "eval", "data build")},
    **dict.fromkeys(("vllm serve", "headstart tune --engine", "headstart export --check"), _NAME),
    "headstart audit --questions FILE.jsonl": "`headstart audit HEADS` is run; its heads are left out in the sentence",
}  # fmt: skip
"""Commands that are neither run nor tested, and why."""


def toy(text: str, words: Mapping[str, str]) -> str:
    """A printed command with toy words in place of its own; `words` fill the braces of `SUBSTITUTIONS`.

    A word is replaced where it stands alone: not in `runs/quickstart`, and not as a variable's name.

    >>> toy('headstart train RECIPE --run-dir runs/RECIPE # $TARGET', {"recipes": "r"})
    'headstart train r/eagle3-8b.yaml --run-dir runs/RECIPE # $TARGET'
    """
    known = dict(SUBSTITUTIONS)
    alone = [_alone(printed) for printed in sorted(known, key=len, reverse=True)]

    def instead(match: re.Match[str]) -> str:
        return re.sub(r"\{(\w+)\}", lambda name: words[name[1]], known[match[0]])

    return re.sub("|".join(alone), instead, text)


def _alone(printed: str) -> str:
    """A pattern of the printed words where they are no part of a longer word."""
    before = r"(?<![\w$./-])" if printed[0].isalnum() else r"(?<![\w-])"
    after = r"(?![\w=.,/-])" if printed[-1].isalnum() else ""
    return before + re.escape(printed) + after
