"""Prompts from several sources: in which order they are drawn, and what conversations depend on then."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from headstart.data.prompts.sources import find_origin
from headstart.recipes.sections import DataSection

T = TypeVar("T")


def in_turns(sources: Sequence[Iterator[T]], weights: Sequence[float]) -> Iterator[tuple[int, T]]:
    """The items of several sources, each with its source's number, as often as its weight says.

    At every point of the order each source has given its share, to within one item for two sources and a few for more.
    A source that has no more is passed over; the others keep their proportions.

    >>> "".join(item for _, item in in_turns([iter("aaaaaa"), iter("BB")], [3, 1]))
    'aaBaaaBa'

    Args:
        sources: the items of each, in order.
        weights: above 0, one for each.
    """
    due = [0.0] * len(sources)
    left = list(range(len(sources)))
    while left:
        for number in left:
            due[number] += weights[number]
        chosen = max(left, key=lambda number: (due[number], -number))
        try:
            item = next(sources[chosen])
        except StopIteration:
            left.remove(chosen)
            continue
        due[chosen] -= sum(weights[number] for number in left)
        yield chosen, item


def mixture_identity(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What conversations depend on that have prompts of several sources: what each holds, and its share.

    Args:
        settings: the recipe's data section, as JSON values.

    Raises:
        UserError: no such file or dataset, or a hub that cannot be asked for its commit.
    """
    total = sum(one["weight"] for one in settings["prompts"])
    identities = []
    for one in settings["prompts"]:
        origin = find_origin(one["source"], one["revision"])
        identities.append(
            {
                "origin": origin.identity,
                "commit": origin.commit,
                "configuration": "" if origin.content is None else configuration(one["source"]),
                "split": one["split"] or settings["split"],
                "share": round(one["weight"] / total, 6),
            }
        )
    return identities


def configuration(source: str) -> str:
    """What a folder of data has after a colon, as in `folder:config`."""
    return "" if Path(source).expanduser().exists() else source.partition(":")[2]


def begun_at(settings: Mapping[str, Any], begun: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that name the commits of the hub that a run began with, whatever is newer.

    Args:
        settings: the recipe's data section, as JSON values.
        begun: the identity of the conversations that the run has; empty when it has none.
    """
    prompts, before = settings["prompts"], begun.get("prompts")
    if isinstance(prompts, str):
        commit = begun.get("revision")
        known = settings["revision"] is None and commit and before == f"{prompts} at {commit}"
        return {**settings, "revision": commit} if known else dict(settings)
    if not isinstance(before, list) or len(before) != len(prompts):
        return dict(settings)
    pairs = zip(prompts, before, strict=True)
    return {
        **settings,
        "prompts": [
            {**one, "revision": one["revision"] or was["commit"]}
            if was["origin"] == f"{one['source']} at {was['commit']}"
            else one
            for one, was in pairs
        ],
    }


def pinned(data: DataSection, identity: Mapping[str, Any]) -> DataSection:
    """The same settings at the commits that an identity names."""
    if isinstance(data.prompts, str):
        return data.model_copy(update={"revision": identity["revision"]})
    pairs = zip(data.prompts, identity["prompts"], strict=True)
    return data.model_copy(
        update={"prompts": tuple(one.model_copy(update={"revision": now["commit"]}) for one, now in pairs)}
    )
