"""A target without its weights has the identity of the loaded one, if its files determine it."""

from __future__ import annotations

from pathlib import Path

import pytest

from headstart.errors import UserError
from headstart.model.loading import load_target
from headstart.model.outline import unloaded
from tests.tiny import tiny_model, tiny_tokenizer


def saved(folder: Path, kind: str) -> str:
    tokenizer = tiny_tokenizer()
    model = tiny_model(kind, vocab_size=len(tokenizer))
    model.generation_config.eos_token_id = [2, 5]
    model.save_pretrained(folder, max_shard_size="100KB")
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "gpt2", "phi3"])
def test_identity_comes_from_the_files(tmp_path: Path, kind: str, dtype: str) -> None:
    """With tied weights (gemma3, gpt2) and without, in several files."""
    folder = saved(tmp_path, kind)
    loaded, known = load_target(folder, dtype, "cpu"), unloaded(folder, dtype, "cpu")
    assert known is not None
    assert all(weight.is_meta for weight in known.model.parameters())
    assert known.identity() == loaded.identity()
    for name in ("dtype", "settings", "vocabulary", "vocab_size", "max_length", "end_tokens", "parameters", "name"):
        assert getattr(known, name) == getattr(loaded, name), name
    assert {2, 5} <= known.end_tokens


def test_other_weights_are_another_target(tmp_path: Path) -> None:
    folder = saved(tmp_path, "llama")
    before = unloaded(folder, "float32", "cpu")
    model = tiny_model("llama", seed=1, vocab_size=len(tiny_tokenizer()))
    model.save_pretrained(folder, max_shard_size="100KB")
    after = unloaded(folder, "float32", "cpu")
    assert before is not None and after is not None and before.identity() != after.identity()


def test_unclear_files_give_none(tmp_path: Path) -> None:
    """Missing files, renamed tensors, and truncated files."""
    folder = saved(tmp_path, "llama")
    for file in tmp_path.glob("*.safetensors"):
        whole = file.read_bytes()
        file.write_bytes(whole.replace(b".weight", b".wieght"))
        assert unloaded(folder, "float32", "cpu") is None
        file.write_bytes(whole[:-8])
        assert unloaded(folder, "float32", "cpu") is None
        file.unlink()
        assert unloaded(folder, "float32", "cpu") is None
        file.write_bytes(whole)
    assert unloaded(folder, "float32", "cpu") is not None
    with pytest.raises(UserError):
        unloaded(str(tmp_path / "nowhere"), "float32", "cpu")
