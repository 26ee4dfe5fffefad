"""`headstart export` and `headstart import` on the command line, and their refusals."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import headstart
from headstart.data.prompts.chat import with_template_kwargs
from headstart.decode.costs import Conditions
from headstart.errors import UserError
from headstart.hub.engines.export import export_for
from headstart.hub.engines.importing import untuned
from headstart.hub.format import export_heads
from headstart.model.model import Target
from tests.engines.conftest import CASES, Made, edited, heads_for
from tests.spies import raising
from tests.test_cli import call, refused, works
from tests.tiny import CHATML, tiny_model, tiny_tokenizer


def test_printed_commands_match_the_engines(made: Made, target: Target, tmp_path: Path) -> None:
    heads, out = made("eagle3-reduced")[1], tmp_path / "served"
    printed = " ".join(works("export", heads, "--format", "vllm", "--out", out).stdout.split())
    assert f"vllm serve {shlex.quote(target.spec)} --speculative-config" in printed
    assert '"method": "eagle3"' in printed and '"num_speculative_tokens": 3' in printed
    assert "--speculative-algorithm EAGLE3" in printed and "--speculative-num-draft-tokens 4" in printed
    card = (out / "README.md").read_text()
    assert "vllm serve TARGET --speculative-config" in card and str(target.spec) not in card
    assert "40 of 292 tokens" in card and "3, 5, 7 (transformers' hidden_states)" in card
    works("export", heads, "--format", "vllm", "--out", out)
    printed = works("export", heads, "--format", "gguf", "--out", tmp_path / "gguf", "--dtype", "q8_0").stdout
    assert "--spec-type draft-eagle3 --spec-draft-n-max 3" in " ".join(printed.split())
    assert "compare draft_n_accepted with --parallel 1" in " ".join(printed.split())


def test_confidence_schedules_served_requests_and_no_measurement(made: Made, tmp_path: Path) -> None:
    """A replay counts drafts, so measurements verify all of them."""
    done = export_for(made("dspark")[1], tmp_path / "served", "vllm")
    assert '"enable_adaptive_verification": true' in done.commands["vllm"]
    assert "enable_adaptive_verification" in (tmp_path / "served" / "README.md").read_text()
    assert "adaptive" not in done.words({})["vllm"][-1] and '"num_speculative_tokens": 4' in done.words({})["vllm"][-1]


def test_printed_command_of_parallel_heads(made: Made, tmp_path: Path) -> None:
    printed = " ".join(works("export", made("peagle")[1], "--format", "vllm", "--out", tmp_path / "out").stdout.split())
    assert '"method": "eagle3"' in printed and '"parallel_drafting": true, "num_speculative_tokens": 3' in printed
    assert "Without parallel_drafting in --speculative-config vLLM ignores mask_hidden" in printed
    assert "vLLM sets it itself for a folder of --format speculators." in printed
    assert "Not for sglang: sglang does not serve peagle heads." in printed
    said = refused("export", made("peagle")[1], "--format", "gguf", "--out", tmp_path / "gguf")
    assert "llama.cpp drafts with EAGLE-3, DFlash and DSpark heads" in said


def test_printed_commands_render_prompts_as_in_training(target: Target, tmp_path: Path) -> None:
    heads, variables = heads_for(target, CASES["eagle3-reduced"]), {"enable_thinking": False}
    quiet = tiny_tokenizer("{% if enable_thinking is defined %}{% endif %}" + CHATML)
    bound = Target(target.model, with_template_kwargs(quiet, variables), target.spec)
    export_heads(tmp_path / "heads", heads, bound, untuned(heads), {})
    done = export_for(tmp_path / "heads", tmp_path / "served", ["vllm", "gguf"])
    for engine, option in (
        ("vllm", "--default-chat-template-kwargs"),
        ("sglang", "--default-chat-template-kwargs"),
        ("llama.cpp", "--chat-template-kwargs"),
    ):
        words = shlex.split(done.commands[engine])
        assert json.loads(words[words.index(option) + 1]) == variables
        assert shlex.join([option, json.dumps(variables)]) in (tmp_path / "served" / "README.md").read_text()
    assert "set `chat_template_kwargs` in each request" in (tmp_path / "served" / "README.md").read_text()


def test_cpu_options_of_vllm_are_printed(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = "On a CPU vLLM also needs --dtype bfloat16 --no-enable-prefix-caching."
    for gpu in (False, True):
        monkeypatch.setattr("torch.cuda.is_available", lambda gpu=gpu: gpu)
        said = works("export", made("eagle3-reduced")[1], "--format", "vllm", "--out", tmp_path / f"served{gpu}").stdout
        assert (needed in " ".join(said.split())) is not gpu
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    said = works("export", made("dflash2")[1], "--format", "vllm", "--out", tmp_path / "blocks").stdout
    assert "DFlash 2 heads only on GPUs" in " ".join(said.split()) and needed not in " ".join(said.split())


def test_drafts_that_did_not_pay_in_tuning_are_said_to_be_the_default(target: Target, tmp_path: Path) -> None:
    heads = heads_for(target, CASES["eagle3"])
    plain = {**untuned(heads), "paths": [], "settings": {"conditions": Conditions.of(target).to_json()}}
    for name, tuning in (("plain", plain), ("tree", {**plain, "paths": [[0]]})):
        export_heads(tmp_path / name, heads, target, tuning, {})
        remarks = export_for(tmp_path / name, tmp_path / f"{name}-served", "vllm").remarks
        assert any("No tree pays where the heads were tuned" in remark for remark in remarks) == (name == "plain")


def run_with(heads: Path, run: Path) -> Path:
    run.mkdir()
    (run / "recipe.yaml").write_text("name: mine\nheads: {}\n")
    (run / "heads").symlink_to(heads)
    return run


def test_heads_of_a_run_are_exported_and_checked(made: Made, tmp_path: Path) -> None:
    run = run_with(made("eagle3")[1], tmp_path / "run")
    works("export", run, "--format", "speculators", "--out", tmp_path / "out")
    said = works("export", "--check", tmp_path / "out", "--engine", "speculators,vllm", "--against", run).stdout
    assert "is complete; speculators and vllm read every tensor" in " ".join(said.split())
    with edited(tmp_path / "out") as config:
        config["eagle_aux_hidden_state_layer_ids"] = [2, 4, 6]
    result = call("export", "--check", tmp_path / "out")
    assert result.exit_code == 1 and "layer ids, rotary base, norms" in " ".join(result.stdout.split())


def test_own_format_is_named_instead_of_checked(made: Made, target: Target, tmp_path: Path) -> None:
    run = run_with(made("eagle3")[1], tmp_path / "run")
    for folder in (made("eagle3")[1], run):
        said = refused("export", "--check", folder)
        assert "in headstart's own format, which no engine reads" in said and "--format vllm" in said
    refused("import", run, "--target", target.spec, "--out", tmp_path / "back")


def spoil(file: Path) -> None:
    weights = load_file(file)
    name = next(name for name, tensor in weights.items() if tensor.is_floating_point() and tensor.ndim == 2)
    weights[name][0, 0] = float("nan")
    save_file(weights, file)


def test_not_finite_weights_are_found(made: Made, target: Target, tmp_path: Path) -> None:
    """Also in a folder without headstart's own note."""
    served = tmp_path / "served"
    works("export", made("eagle3")[1], "--format", "vllm", "--out", served)
    spoil(served / "model.safetensors")
    with edited(served) as config:
        del config["headstart"]
    result = call("export", "--check", served)
    assert result.exit_code == 1 and "it holds NaN or infinity" in " ".join(result.stdout.split())
    said = refused("import", served, "--target", target.spec, "--out", tmp_path / "back")
    assert "not finite" in said and not (tmp_path / "back").exists()


@pytest.mark.parametrize("format", ["vllm", "gguf"])
def test_not_finite_heads_are_not_exported(made: Made, format: str, tmp_path: Path) -> None:
    shutil.copytree(made("eagle3")[1], tmp_path / "heads")
    spoil(tmp_path / "heads" / "heads.safetensors")
    assert "not finite" in refused("export", tmp_path / "heads", "--format", format, "--out", tmp_path / "served")
    assert not (tmp_path / "served").exists()


def test_full_disk_is_reported(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "safetensors.torch.save_file",
        raising(SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")),
    )
    said = refused("export", made("eagle3")[1], "--format", "vllm", "--out", tmp_path / "served")
    assert "full" in said and not list(tmp_path.iterdir())


def test_import_on_the_command_line(made: Made, target: Target, tmp_path: Path) -> None:
    works("export", made("medusa")[1], "--format", "vllm", "--out", tmp_path / "there", "--dtype", "float32")
    asked = ("import", tmp_path / "there", "--target", target.spec, "--out", tmp_path / "back", "--dtype", "float32")
    assert "(medusa)" in works(*asked).stdout
    works(*asked)
    options = ("--prompt", "hello", "--max-new-tokens", 4, "--dtype", "float32")
    with_heads = works("generate", tmp_path / "back", *options, "--drafter", "heads").stdout
    assert with_heads == works("generate", tmp_path / "back", *options, "--drafter", "none").stdout
    assert "holds other files" in refused(*asked[:-3], tmp_path / "there" / "..", *asked[-2:])


def test_unsupported_heads_are_refused_with_the_reason(made: Made, target: Target, tmp_path: Path) -> None:
    def problem(settings: dict[str, object], form: str) -> str:
        export_heads(tmp_path / "heads", heads := heads_for(target, settings), target, untuned(heads), {})
        return refused("export", tmp_path / "heads", "--format", form, "--out", tmp_path / "out")

    fused = CASES["eagle3"]
    assert "No serving engine knows mtp heads" in problem({"family": "mtp", "draft_steps": 2}, "sglang")
    assert "No serving engine knows hydra heads" in problem({"family": "hydra", "num_heads": 2}, "gguf")
    assert "heads.input_map=false" in problem({"family": "medusa", "num_heads": 2}, "vllm")
    for case in ("medusa", "medusa-shared"):
        assert "Medusa heads with a reduced vocabulary" in problem({**CASES[case], "draft_vocab_size": 40}, "vllm")
    assert "not serve Medusa heads" in problem(CASES["medusa"], "sglang")
    assert "EAGLE-3 heads and block drafters, not EAGLE-1" in problem(CASES["eagle"], "speculators")
    assert "llama.cpp drafts with EAGLE-3, DFlash and DSpark heads" in problem(CASES["eagle"], "gguf")
    assert "heads.embedding_norm=false" in problem(CASES["eagle"], "sglang")
    for settings, said in (
        ({"num_layers": 2}, "llama.cpp runs one layer"),
        ({"qk_norm": True}, "llama.cpp does not know norms of queries and keys (heads.qk_norm)"),
        ({"aux_layers": (2, 3)}, "fuses 3 layers"),
        ({"aux_layers": (2, 3, 8)}, "of a target with 8 layers: 7 is the deepest"),
        ({"feedback": "post_norm"}, "does not know norm_output (heads.feedback=post_norm)"),
        ({"aux_norms": True}, "does not know fc_norm (heads.aux_norms)"),
        ({"hidden_act": "gelu"}, "supports only silu"),
    ):
        assert said in problem({**fused, **settings}, "gguf")
    assert not (tmp_path / "out").exists()
    assert "sglang does not know fc_norm" in problem({**fused, "aux_norms": True}, "sglang")
    remark = works("export", tmp_path / "heads", "--format", "vllm", "--out", tmp_path / "out").stdout
    assert "Not for sglang: sglang does not know fc_norm" in " ".join(remark.split())


def test_targets_without_hooks_are_refused(tmp_path: Path) -> None:
    model = tiny_model("gpt_neox", vocab_size=len(tiny_tokenizer()), layers=4)
    target = Target(model, tiny_tokenizer(), "neox")
    heads = heads_for(target, {"family": "eagle3", "aux_layers": (1, 2, 3), "draft_steps": 2, "hidden_act": "silu"})
    export_heads(tmp_path / "heads", heads, target, untuned(heads), {})
    with pytest.raises(UserError, match=r"llama\.cpp has no hooks in gpt_neox targets") as caught:
        headstart.export(tmp_path / "heads", tmp_path / "out", "gguf", target)
    assert "--format vllm" in caught.value.remedy


def test_bad_input_is_refused(made: Made, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heads, out = made("eagle3")[1], tmp_path / "out"
    assert "--out is missing" in refused("export", heads)
    assert "HEADS is missing" in refused("export", "--out", out)
    assert "--check writes nothing" in refused("export", heads, "--check", out)
    assert "belong to --check" in refused("export", heads, "--out", out, "--engine", "vllm")
    assert "vllm has no dtype 'q8_0'" in refused("export", heads, "--out", out, "--format", "vllm", "--dtype", "q8_0")
    out.mkdir()
    (out / "notes.txt").touch()
    assert "would be lost: notes.txt" in refused("export", heads, "--out", out, "--format", "vllm")
    (out / "notes.txt").rename(out / "model.safetensors")
    assert "would be lost" in refused("export", heads, "--out", out, "--format", "vllm")
    assert "No folder at" in refused("export", "--check", tmp_path / "none")
    works("export", heads, "--out", tmp_path / "vllm", "--format", "vllm")
    assert "Did you mean 'sglang'" in refused("export", "--check", tmp_path / "vllm", "--engine", "slang")
    result = call("export", "--check", tmp_path / "vllm", "--engine", "llama.cpp,vllm")
    said = " ".join(result.stdout.split())
    assert result.exit_code == 1 and "llama.cpp: It does not read the format vllm" in said and "--format gguf" in said
    assert "is complete; vllm reads every tensor." in said, "other engines are still checked"
    weights = tmp_path / "vllm" / "model.safetensors"
    assert f"{weights} is a file, not a folder" in refused("export", "--check", weights)
    assert f"{weights} is a file, not a folder" in refused("export", weights, "--out", tmp_path / "x")
    (tmp_path / "vllm" / "config.json").write_text("{")
    result = call("export", "--check", tmp_path / "vllm")
    assert "Delete it" not in result.output and "Fetch the checkpoint again" in " ".join(result.output.split())
    nothing = call("export", "--check", target.spec)
    assert nothing.exit_code == 1 and "holds no draft heads" in nothing.output
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "pip install gguf" in refused("export", heads, "--out", tmp_path / "g", "--format", "gguf")
    assert not (tmp_path / "g").exists()


def test_heads_of_another_target_are_detected(made: Made, target: Target, tmp_path: Path) -> None:
    export_for(made("eagle3")[1], tmp_path / "out", "vllm")
    other = Target(tiny_model("llama", seed=5, vocab_size=target.vocab_size, layers=8), target.tokenizer, target.spec)
    heads = heads_for(other, CASES["eagle3"])
    export_heads(tmp_path / "others", heads, other, untuned(heads), {})
    said = " ".join(call("export", "--check", tmp_path / "out", "--against", tmp_path / "others").stdout.split())
    assert "is another model" in said
