"""Check a refusal of a spec, or a line, by what it promises: its key, its number, and a value that works."""

import re

import pytest

from hf_parallel.ask.config import ParallelConfig, SpecError
from hf_parallel.ask.spec import read_spec

AXES = ("dp_replicate", "pp", "dp_shard", "cp", "tp", "ep")


def refused(spec: str, world_size: int | None = None) -> str:
    """Return the one line that refuses a spec, or refuses it on this many processes."""
    with pytest.raises(SpecError) as caught:
        start(spec, world_size)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def pattern_of_refusal(what: str, *numbers: object, works: str) -> str:
    """Return what finds a refusal by its key and value, its numbers and its way out, whatever its sentence.

    Args:
        what: what the line begins with, such as `pack_tokens=8`.
        numbers: of the line, or names, in any order.
    """
    seen = "".join(rf"(?=.*{_find_word(number)})" for number in numbers)
    return rf"{re.escape(what)}:? {seen}.*{re.escape(works)}"


def find_line(text: str, *words: object) -> str:
    """Return the first line of a text that has all these words and numbers, in any order; "" if no line has."""
    patterns = [_find_word(word) for word in words]
    return next((line for line in text.splitlines() if all(re.search(one, line) for one in patterns)), "")


def _find_word(word: object) -> str:
    return rf"(?<!\w){re.escape(str(word))}(?!\w)"


def start(spec: str | dict[str, object], world_size: int | None = None) -> ParallelConfig:
    """Read a spec, or its values, as a run does; `world_size` resolves the axis of -1."""
    config = ParallelConfig.parse(spec) if isinstance(spec, str) else ParallelConfig.from_mapping(spec)
    return config if world_size is None else config.resolve(world_size)


def check_way_out(spec: str, world_size: int | None = None, key: str | None = None) -> None:
    """Fail unless the refusal of a spec names a key and the value it has there, and its suggestion starts.

    Args:
        spec: what is refused.
        world_size: processes, where the refusal depends on them.
        key: what the refusal has to begin with; the last key of the spec by default.
    """
    message = refused(spec, world_size)
    values = dict(read_spec(spec))
    key = key or list(values)[-1]
    assert re.match(rf"{key}(_size)?={re.escape(str(values[key]).replace(' ', ''))}: ", message), message
    suggestion = re.search(r"; ([^;]+) works$", message)
    assert suggestion, message
    for way in suggestion[1].split(" or "):
        start(_changed(values, way, key), world_size)


def _changed(values: dict[str, object], way: str, key: str) -> dict[str, object]:
    """Return a spec's values with a suggestion: `pp_size=2`, `4` of the same key, `dp_shard in the place of pp`."""
    named = {f"{name}_size" if name in AXES else name: value for name, value in values.items()}
    if moved := re.fullmatch(r"(\w+) in the place of (\w+)", way):
        there, here = f"{moved[1]}_size", f"{moved[2]}_size"
        return {**{name: value for name, value in named.items() if name != here}, there: named[here]}
    if without := re.fullmatch(r"tp=(\d+) without tp_mesh", way):
        way = f"tp={without[1]},tp_mesh=none"
    changes = read_spec(way if "=" in way else f"{key}={way}")
    return named | {f"{name}_size" if name in AXES else name: value for name, value in changes.items()}


def follow_ways_out(values: dict[str, str], world_size: int | None = None, most: int = 4) -> int:
    """Take each suggestion of the refusals of a spec until it starts. Return how many it took.

    Raises:
        AssertionError: a refusal has no suggestion, one for the same key follows it, or more than `most` are needed.
    """
    waiting: list[tuple[dict[str, object], int | None, tuple[str, ...]]] = [(dict(values), world_size, ())]
    longest = 0
    while waiting:
        asked, world, said = waiting.pop()
        try:
            start(asked, world)
        except SpecError as error:
            message = str(error)
        else:
            longest = max(longest, len(said))
            continue
        story = "\n  ".join([f"{values} on {world_size}", *said, message])
        keys = [_refused_key(line) for line in (*said, message)]
        assert len(keys) < 2 or keys[-1] != keys[-2], f"refused again for its key:\n  {story}"
        assert len(keys) <= most, f"no end:\n  {story}"
        if processes := re.search(r"; start (\d+) processes", message):
            waiting.append((asked, int(processes[1]), (*said, message)))
            continue
        suggestion = re.search(r"; ([^;]+) works$", message)
        assert suggestion, f"no suggestion:\n  {story}"
        waiting += [(_changed(asked, way, keys[-1]), world, (*said, message)) for way in suggestion[1].split(" or ")]
    return longest


def _refused_key(message: str) -> str:
    """Return the key that a refusal is about: the last of those that it begins with."""
    found = re.findall(r"(\w+)=", message.partition(": ")[0])
    return found[-1] if found else message
