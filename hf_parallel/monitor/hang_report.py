"""The knowledge of all ranks about a hang, joined into sentences.

    ranks 0-2 wait in reduce_scatter number 4,711 (dp_shard, layers.7.mlp) for rank 3; rank 3 is in the data loader
    (`my_dataset.py:41`)

Collectives are compared by group and number: at the first one in which ranks differ, one of them has left one out, or
calls another, or with another shape. Ranks that wait for each other in different groups are told as a circle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from hf_parallel.ranks.groups import format_spans

#: Collectives to which ranks may give tensors of different shapes.
_UNEVEN = {"all_to_all", "gather", "scatter", "broadcast", "barrier"}
_MESSAGES = {"send": "to", "receive": "from"}
Facts = dict  # of one rank, see `Watchdog`


def format_hang(facts: dict[int, Facts]) -> str:
    """Return what holds the ranks up, by rank."""
    found = describe_mismatch(facts)
    around = [] if found else find_circle(facts)
    steps = [
        f"rank {one} for rank {two} in {_format_collective(find_waited_for(facts[one]))}"
        for one, two in zip(around, [*around[1:], *around[:1]], strict=True)
    ]
    rest = {rank: own for rank, own in facts.items() if rank not in around}
    told = [
        found,
        "ranks wait for each other in a circle: " + ", ".join(steps) if around else None,
        format_states_of_ranks(rest, facts) if rest else None,
    ]
    return "; ".join(filter(None, told))


# ---- where each rank is --------------------------------------------------------------------------------------------


def format_states_of_ranks(of_these: dict[int, Facts], facts: dict[int, Facts]) -> str:
    """Return the ranks that wait first, those that they wait for after them."""
    texts: dict[tuple[bool, str, str], list[int]] = {}
    for rank in sorted(of_these):
        texts.setdefault(_state(rank, facts), []).append(rank)
    ordered = sorted(texts.items(), key=lambda found: not found[0][0])  # stable: by rank otherwise
    return "; ".join(f"{format_rank_numbers(of)} {one if len(of) == 1 else many}" for (_, one, many), of in ordered)


def _state(rank: int, facts: dict[int, Facts]) -> tuple[bool, str, str]:
    """Return whether a rank waits, and its state in words for one rank and for several."""
    own = facts[rank]
    if own.get("absent"):
        return False, f"{own['absent']}", f"{own['absent']}"
    if own.get("failed") and own["pending"]:
        text = f"lost a peer in {_format_collective(own['pending'][0])}"
        return True, text, text
    if own.get("error"):
        return False, f"has left the training by {own['error']}", f"have left the training by {own['error']}"
    if find_waited_for(own) is not None:
        missing = list_missing_ranks(rank, facts)
        text = _format_collective(find_waited_for(own)) + (f" for {format_rank_numbers(missing)}" if missing else "")
        return True, f"waits in {text}", f"wait in {text}"
    return False, f"is {own['place']}", f"are {own['place']}"


def find_waited_for(own: Facts) -> Facts | None:
    """Return the collective in which a rank waits, if it does."""
    return own["pending"][0] if own.get("waits") and own.get("pending") else None


def _format_collective(entry: Facts | None) -> str:
    assert entry is not None
    at = entry["module"] or (None if entry["backward"] else entry.get("place"))
    inside = ", ".join(filter(None, [entry["axis"], at, "backward" if entry["backward"] else None]))
    if entry["operation"] in _MESSAGES:
        peer = "any rank" if entry["peer"] is None else f"rank {entry['peer']}"
        return f"{entry['operation']} {_MESSAGES[entry['operation']]} {peer} ({inside})"
    return f"{entry['operation']} number {entry['number']:,} ({inside})"


def list_missing_ranks(rank: int, facts: dict[int, Facts]) -> list[int]:
    """Return the ranks that have not come to the collective in which a rank waits."""
    entry = find_waited_for(facts[rank])
    if entry is None:
        return []
    if entry["operation"] in _MESSAGES:
        return [] if entry["peer"] is None else [entry["peer"]]
    missing = []
    for other in facts[rank]["groups"][entry["group"]]["ranks"]:
        last = facts.get(other, {}).get("groups", {}).get(entry["group"], {"last": []})["last"]
        numbers = [found["number"] for found in last if found["operation"] not in _MESSAGES]
        if other != rank and max(numbers, default=0) < entry["number"]:
            missing.append(other)
    return missing


# ---- who differs -------------------------------------------------------------------------------------------------


def describe_mismatch(facts: dict[int, Facts]) -> str | None:
    """Return the first collective in which ranks of a group differ, in a group in which somebody waits."""
    waiting = {entry["group"] for own in facts.values() if (entry := find_waited_for(own)) is not None}
    if any(own.get("error") for own in facts.values()):  # it may have been raised by such a one
        waiting |= {group for own in facts.values() for group in own.get("groups", {})}
    for group in sorted(waiting):
        own_of = {rank: own["groups"][group] for rank, own in sorted(facts.items()) if group in own.get("groups", {})}
        # Only ranks of one and the same group of this name are compared
        same = Counter(tuple(own["ranks"]) for own in own_of.values()).most_common(1)[0][0]
        by_number: dict[int, dict[int, Facts]] = {}  # number -> rank -> its collective
        for rank, own in own_of.items():
            for entry in own["last"] if tuple(own["ranks"]) == same else ():
                if entry["operation"] not in _MESSAGES:
                    by_number.setdefault(entry["number"], {})[rank] = entry
        differing = [number for number, entries in by_number.items() if len(_sort_by_kind(entries)) > 1]
        if not differing:
            continue
        number = min(differing)
        entries, following = by_number[number], by_number.get(number + 1, {})
        kinds = _sort_by_kind(entries)
        (usual, most), (other, few), *_ = kinds.items()
        for one, those, theirs in ((other, few, most), (usual, most, few)):  # fewer ranks are blamed where both may be
            if one in _sort_by_kind({rank: following[rank] for rank in theirs if rank in following}):
                left_out = _with_shape(entries[theirs[0]])
                which = f"which is number {number:,} on {format_rank_numbers(theirs)}"
                return f"{format_rank_numbers(those)} left out {left_out}, {which}"
        told = [f"{_with_shape(entries[of[0]])} on {format_rank_numbers(of)}" for of in kinds.values()]
        return f"number {number:,} of {entries[most[0]]['axis']} differs: " + " and ".join(told)
    return None


def _sort_by_kind(entries: dict[int, Facts]) -> dict[tuple, list[int]]:
    """Return the different things that ranks do under one number, those of most ranks first."""
    found: dict[tuple, list[int]] = {}
    for rank, entry in entries.items():
        shape = None if entry["operation"] in _UNEVEN else (tuple(entry["shape"] or ()), entry["dtype"])
        kind = entry["operation"], shape, entry["module"], entry["backward"], entry["place"]
        found.setdefault(kind, []).append(rank)
    return dict(sorted(found.items(), key=lambda kind: -len(kind[1])))


def _with_shape(entry: Facts) -> str:
    shape = "" if entry["shape"] is None else f" of {entry['shape']} {entry['dtype']}"
    where = ", ".join(filter(None, [entry["axis"], entry["module"] or entry["place"]]))
    return f"{entry['operation']}{shape} ({where})"


def find_circle(facts: dict[int, Facts]) -> list[int]:
    """Return the ranks each of which waits for the next, and the last one for the first."""
    after = {rank: list_missing_ranks(rank, facts) for rank in facts}
    for start in sorted(after):
        path = [start]
        while (following := next((rank for rank in after.get(path[-1], []) if rank in after), None)) is not None:
            if following in path:
                return path[path.index(following) :]
            path.append(following)
    return []


def format_rank_numbers(numbers: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-2, 5`."""
    spans = ", ".join(format_spans(numbers))
    return f"rank {spans}" if spans.isdecimal() else f"ranks {spans}"
