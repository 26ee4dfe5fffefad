"""What earlier versions called things, with what they are called now: recipe keys, values, settings of heads, rules.

A recipe that a person wrote is refused with a hint that names the new word. What headstart wrote itself (the recipe of
a run, the settings of saved heads, and the records of `headstart.support.old_records`) is read under the old words too: a new
name loses no work.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")

KEYS: dict[str, str] = {
    "data.openers": "data.seed_prompts",
    "data.calibration": "data.validation",
    "train.clip": "train.max_grad_norm",
    "train.accumulate": "train.gradient_accumulation_steps",
    "train.finish": "train.round_starts_fraction",
    "heads.tap_layers": "heads.aux_layers",
    "heads.tap_norms": "heads.aux_norms",
    "heads.start": "heads.init",
    "heads.steps": "heads.draft_steps",
}
"""Recipe keys, old to new; both with their section."""
VALUES: dict[str, dict[str, str]] = {
    "train.position_weight": {"auf": "accept_until_failure", "sampled": "subsampled"},
    "heads.init": {"cold": "random"},
}
"""By recipe key as it is called now: values, old to new."""
RULES: dict[str, str] = {"rrs": "traversal", "block": "traversal"}
"""Verification rules that are gone, with one that accepts as much or more everywhere."""
TENSORS: dict[str, str] = {"tap_norms.": "aux_norms."}
"""Beginnings of the names of saved tensors, old to new."""
_JOINED = "transition"
"""What `eagle3` with `join=true` is called; `eagle3` alone is the published arrangement."""


def hint(key: str) -> str | None:
    """What to write instead of a recipe key of an earlier version; None for keys that no version had.

    >>> hint("heads.join")
    'heads.join=true is a family of its own now: heads.family=transition (without join and feedback).'
    """
    if key == "heads.join":
        return f"heads.join=true is a family of its own now: heads.family={_JOINED} (without join and feedback)."
    return f"It is called {KEYS[key]} now." if key in KEYS else None


def value_hint(key: str, value: object) -> str | None:
    """What to write instead of a value of an earlier version; None for values that no version had."""
    new = VALUES.get(key, {}).get(str(value))
    return f"{value} is called {new} now." if new else None


def rule_hint(name: str) -> str | None:
    """What to use instead of a verification rule of an earlier version; None for rules that no version had.

    >>> rule_hint("rrs")
    'Use traversal in place of rrs: it accepts as much or more.'
    """
    return f"Use {RULES[name]} in place of {name}: it accepts as much or more." if name in RULES else None


def recipe_now(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe as this version writes it, from one of any version."""
    return {name: section_now(name, part) if isinstance(part, Mapping) else part for name, part in recipe.items()}


def section_now(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """One section of a recipe, or the config of heads, as this version writes it.

    >>> section_now("heads", {"family": "eagle3", "num_layers": 4, "join": True, "feedback": "post_norm"})
    {'family': 'transition', 'num_layers': 4}
    >>> section_now("heads", {"family": "eagle3", "num_layers": 4, "join": False, "feedback": "post_norm"})
    {'family': 'eagle3', 'num_layers': 4, 'feedback': 'post_norm'}
    """
    kept = dict(values)
    if section == "heads" and kept.get("family") == "eagle3" and kept.pop("join", False):
        kept["family"] = _JOINED
        kept.pop("feedback", None)
    found = {}
    for key, value in kept.items():
        new = KEYS.get(f"{section}.{key}", f"{section}.{key}")
        known = VALUES.get(new, {})
        found[new.removeprefix(f"{section}.")] = known.get(value, value) if isinstance(value, str) else value
    return found


def tensors_now(state: Mapping[str, T]) -> dict[str, T]:
    """Saved tensors by the names that this version gives them."""
    return {
        next((new + name.removeprefix(old) for old, new in TENSORS.items() if name.startswith(old)), name): tensor
        for name, tensor in state.items()
    }
