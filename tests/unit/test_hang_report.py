"""What ranks know of a hang, as sentences."""

import pytest

from hf_parallel.ask.config import ParallelConfig
from hf_parallel.ask.spec import SpecError
from hf_parallel.monitor.hang_report import format_hang
from tests.refusals import pattern_of_refusal


def entry(number, operation="reduce_scatter", axis="dp_shard", module="layers.7.mlp", shape=(4, 3), **facts):
    found = {"number": number, "operation": operation, "axis": axis, "module": module, "shape": list(shape)}
    return {**found, "dtype": "float32", "backward": False, "place": None, "peer": None, **facts}


def rank(*last, group="3", ranks=(0, 1, 2, 3), waits=True, place="at `train.py:7`", **facts):
    """One that waits in the last of its collectives, or is somewhere else."""
    groups = {group: {"axis": last[0]["axis"], "ranks": list(ranks), "last": list(last)}} if last else {}
    pending = [{**last[-1], "group": group}] if waits and last else []
    return {"waits": waits, "pending": pending, "groups": groups, "place": place, **facts}


def test_three_wait_for_one():
    waiting = rank(entry(4710), entry(4711))
    facts = {0: waiting, 1: waiting, 2: waiting}
    facts[3] = rank(entry(4710), waits=False, place="in the data loader (`my_dataset.py:41`)")
    assert format_hang(facts) == (
        "ranks 0-2 wait in reduce_scatter number 4,711 (dp_shard, layers.7.mlp) for rank 3; "
        "rank 3 is in the data loader (`my_dataset.py:41`)"
    )


def test_one_that_was_left_out():
    seven, eight, nine = entry(7, module="a"), entry(8, module="b"), entry(8, module="a")
    facts = {0: rank(seven, eight, ranks=(0, 1)), 1: rank({**eight, "number": 7}, nine, ranks=(0, 1))}
    assert format_hang(facts).startswith(
        "rank 1 left out reduce_scatter of [4, 3] float32 (dp_shard, a), which is number 7"
    )


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (entry(8, shape=(5, 3)), "reduce_scatter of [5, 3] float32 (dp_shard, layers.7.mlp) on rank 2"),
        (entry(8, operation="all_gather"), "all_gather of [4, 3] float32 (dp_shard, layers.7.mlp) on rank 2"),
    ],
)
def test_what_differs_under_one_number(other, told):
    facts = {0: rank(entry(7), entry(8)), 1: rank(entry(7), entry(8)), 2: rank(entry(7), other)}
    found = format_hang(facts)
    assert found.startswith("number 8 of dp_shard differs: reduce_scatter of [4, 3] float32")
    assert f"on ranks 0-1 and {told};" in found


def test_groups_of_one_name_that_are_not_the_same():
    """Each stage has a group for its own tp ranks."""
    one, two = rank(entry(8), ranks=(0, 1)), rank(entry(8, shape=(9,)), ranks=(2, 3))
    assert "differs" not in format_hang({0: one, 1: one, 2: two, 3: two})


def test_messages_in_a_pipeline():
    last = entry(3, "receive", "pp", "layers.4", peer=0)
    facts = {0: rank(waits=False, place="in a callback (`cb.py:1`, on_log)"), 1: rank(last, ranks=(0, 1))}
    assert format_hang(facts) == (
        "rank 1 waits in receive from rank 0 (pp, layers.4) for rank 0; rank 0 is in a callback (`cb.py:1`, on_log)"
    )


@pytest.mark.parametrize("value", ["soon", "0", "-3", "nan"])
def test_no_seconds(value):
    with pytest.raises(
        SpecError, match=pattern_of_refusal(f"hang_timeout_s={value}", works="hang_timeout_s=600 works")
    ):
        ParallelConfig.parse(f"hang_timeout_s={value}")
    ParallelConfig.parse("hang_timeout_s=600")
