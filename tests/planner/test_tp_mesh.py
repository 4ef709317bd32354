"""Grids of tp in the planner: when they send less, and the table of docs/reference/tensor_meshes_bytes.md."""

from pathlib import Path

import pytest

from hf_parallel.planner import make_cluster, predict, shape_of
from hf_parallel.planner.candidates import Goal, iterate_layouts
from hf_parallel.planner.layout import Job, make_layout
from hf_parallel.planner.ledger import block_transfers
from tests.models import LLAMA_8B
from tests.planner.test_search import LLAMA_70B, searched

#: The numbers of Llama 3 405B (Dubey et al., 2024, table 3).
LLAMA_405B = {"layers": 126, "hidden": 16384, "heads": 128, "kv_heads": 8, "ffn_hidden": 53248, "vocab": 128256}
MODELS = {"8B": LLAMA_8B, "70B": LLAMA_70B, "405B": LLAMA_405B}
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "tensor_meshes_bytes.md"
TOKENS = 8192
COLUMNS = (1, 2, 4, 8)


def layer(model, columns, tp, tokens=TOKENS):
    """(block, hidden size, layout, job, cluster) of a layer in one domain of fast links."""
    shape = shape_of(model)
    where = make_layout({"tp": tp, "tp_columns": columns, "sequence_parallel": True}, tp)
    job = Job(tokens, 1, 1, engine="hf_parallel")
    return shape.blocks[0], shape.hidden, where, job, make_cluster("b200-180gb", tp, per_node=72)


def sent(model, columns, tp):
    """MB that a rank sends of a layer, forward and backward, in bf16."""
    return sum(transfer.bytes for transfer in block_transfers(*layer(model, columns, tp))) / 1e6


def rows():
    for name, model in MODELS.items():
        for tp in (4, 8, 16, 32, 64):
            if model["heads"] % tp == 0:
                found = {columns: sent(model, columns, tp) for columns in COLUMNS if columns * columns <= tp}
                shown = [f"{found[columns]:.0f}" if columns in found else "" for columns in COLUMNS]
                yield f"| {name} | {tp} | {' | '.join(shown)} |"


def test_the_table_of_the_docs():
    page = PAGE.read_text()
    assert [row for row in rows() if row not in page] == []


def test_few_ranks_send_more_on_a_grid_and_many_less():
    for model in (LLAMA_70B, LLAMA_405B):
        assert sent(model, 2, 4) > 1.3 * sent(model, 1, 4)
        assert sent(model, 2, 16) < 0.85 * sent(model, 1, 16)
        assert sent(model, 4, 64) < 0.6 * sent(model, 1, 64)


def test_a_grid_of_64_ranks_is_faster_for_405b_in_one_domain():
    given = {"model": LLAMA_405B, "gpu": make_cluster("b200-180gb", 64, per_node=72), "gpus": 64, "seq": TOKENS}
    given |= {"micro_batch": 1, "global_batch": 1, "engine": "hf_parallel", "recompute": "selective"}
    flat, grid = (
        predict(layout={"tp": 64, "tp_columns": columns, "sequence_parallel": True}, **given) for columns in (1, 4)
    )
    assert grid.step_time_s < flat.step_time_s
    assert grid.memory_gib < flat.memory_gib  # which keeps keys' projections whole on every rank


def seconds(layout, per_node, seq, global_batch):
    """Of a step of 70B on 64 GPUs."""
    given = {"gpu": make_cluster("h100-80gb", 64, per_node=per_node), "gpus": 64, "seq": seq, "micro_batch": 1}
    given |= {"engine": "hf_parallel", "recompute": "full", "global_batch": global_batch}
    return predict(model=LLAMA_70B, layout={"sequence_parallel": True, **layout}, **given).step_time_s


def test_many_tokens_are_for_less_tp():
    """32k tokens on 16 ranks and more: gathering weights over data ranks costs less than any grid."""
    smaller = seconds({"tp": 8, "zero_stage": 3}, 64, 32768, 8)
    grids = [seconds({"tp": 16, "tp_columns": columns, "zero_stage": 3}, 64, 32768, 8) for columns in (1, 2, 4)]
    assert smaller < 0.9 * min(grids)


def test_over_nodes_a_grid_gains_little():
    """Within a quarter of `tp=16` over two nodes, one way or the other."""
    flat, *grids = (seconds({"tp": 16, "tp_columns": columns, "zero_stage": 3}, 8, 8192, 4) for columns in (1, 2, 4))
    assert 0.75 * flat < min(grids)


@pytest.mark.parametrize(("per_node", "offered"), [(8, set()), (72, {"8x2", "4x4", "16x2", "8x4", "32x2", "16x4"})])
def test_grids_are_offered_from_16_ranks_on(per_node, offered):
    goal = Goal(shape_of(LLAMA_405B), make_cluster("b200-180gb", 64, per_node), TOKENS, 64)
    assert {config.tp_mesh for config in iterate_layouts(goal) if config.tp_mesh} == offered


def test_what_is_chosen_has_no_grid_below_16_ranks():
    for choice in searched(LLAMA_70B, 16, gpu="b200-180gb", per_node=72, top=40).choices:
        assert choice.config.tp_mesh is None or choice.config.tp_size >= 16
