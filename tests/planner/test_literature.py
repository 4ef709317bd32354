"""The planner's formulas against the numbers that papers and other tools print."""

import pytest

from hf_parallel.axes.pipeline.timeline import order
from hf_parallel.planner import Layout, make_cluster, predict, shape_of
from hf_parallel.planner.activations import count_kept_bytes
from hf_parallel.planner.layout import Job, make_job
from hf_parallel.planner.ledger import find_busiest, make_groups, ring_factor
from hf_parallel.planner.memory import GIB
from hf_parallel.planner.pipeline import compute_pipeline_seconds, count_live_forwards, make_1f1b_order, make_stages
from hf_parallel.planner.shape import make_dense_block
from hf_parallel.planner.states import StateBytes, count_host_bytes, count_nvme_bytes, offload_seconds, zero_states
from tests.models import LLAMA_8B

LLAMA_70B = {"layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn_hidden": 28672, "vocab": 128256}
GPT_22B = {"layers": 48, "hidden": 6144, "heads": 64, "ffn_hidden": 24576, "vocab": 51200}
GPT_175B = {"layers": 96, "hidden": 12288, "heads": 96, "ffn_hidden": 49152, "vocab": 51200}


def in_bytes(transfers, axis, kind=None):
    return sum(t.bytes for t in transfers if t.axis == axis and kind in (None, t.kind))


# ---- ZeRO (arXiv:1910.02054) ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "gigabytes"),
    [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)],  # figure 1: 7.5 billion parameters, 64 ranks, K = 12
)
def test_states_of_zero_are_those_of_figure_1(stage, gigabytes):
    assert sum(zero_states(7.5e9, 64, stage).values()) / 1e9 == pytest.approx(gigabytes, abs=0.05)


@pytest.mark.parametrize("shards", [1, 8, 1024])
def test_states_of_zero_by_formula(shards):
    parameters, k = 3e9, 12
    expected = [2 + 2 + k, 2 + 2 + k / shards, 2 + (2 + k) / shards, (2 + 2 + k) / shards]
    found = [sum(zero_states(parameters, shards, stage).values()) / parameters for stage in range(4)]
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("numbers", "zero3", "zero2"),
    [(LLAMA_8B, 18.78, 31.78), (LLAMA_70B, 151.76, 279.26)],
)
def test_states_against_deepspeeds_estimator(numbers, zero3, zero2):
    """It keeps fp32 gradients too, adds the largest layer under ZeRO-3, and counts a rank's slice of the 16-bit
    weights beside the whole under ZeRO-2."""
    shape = shape_of({**numbers, "tied": False})
    state = StateBytes(weights=2, gradients=4, optimizer=12)
    sharded = sum(zero_states(shape.parameters, 8, 3, state).values()) + 4 * shape.embedding_parameters
    assert sharded / GIB == pytest.approx(zero3, abs=0.01)
    whole = sum(zero_states(shape.parameters, 8, 2, state).values()) + 2 * shape.parameters / 8
    assert whole / GIB == pytest.approx(zero2, abs=0.01)


@pytest.mark.parametrize(("stage", "volume"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_traffic_of_zero_is_two_or_three_times_the_parameters(stage, volume):
    """Section 7: per step and rank, in elements, for many ranks; stage 3 gathers its weights twice."""
    shape, layout, job = shape_of(LLAMA_8B), Layout(dp=1024, zero_stage=stage), Job(2048, 1, 1)
    cluster = make_cluster("h100-80gb", 1024)
    sent = in_bytes(find_busiest(make_stages(shape, layout, job), layout, job, cluster), "dp")
    assert sent / (2 * shape.parameters) == pytest.approx(volume, rel=0.002)


def test_zero_3_gathers_again_for_every_micro_batch():
    shape, layout = shape_of(LLAMA_8B), Layout(dp=8, zero_stage=3)
    cluster = make_cluster("h100-80gb", 8)
    one, four = (
        in_bytes(find_busiest(make_stages(shape, layout, job), layout, job, cluster), "dp")
        for job in (Job(2048, 1, 1), Job(2048, 1, 4))
    )
    assert four == pytest.approx(4 * one)


# ---- rings and tensor parallelism -----------------------------------------------------------------------------------


def test_ring_formulas():
    assert ring_factor("all_reduce", 8) == pytest.approx(2 * 7 / 8)
    assert ring_factor("all_gather", 8) == ring_factor("reduce_scatter", 8) == pytest.approx(7 / 8)
    assert ring_factor("all_to_all", 4) == pytest.approx(3 / 4)
    assert ring_factor("p2p", 2) == 1


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_tensor_parallelism_reduces_four_times_per_layer(recompute):
    """Shoeybi et al., 2019: two in the forward, two in the backward; recomputation repeats those of the forward."""
    shape, layout = shape_of(GPT_22B), Layout(tp=8)
    job = make_job(layout, 2048, 4, 4, recompute=recompute)
    found = find_busiest(make_stages(shape, layout, job), layout, job, make_cluster("a100-80gb", 8))
    (reductions,) = [t for t in found if t.axis == "tp"]
    assert reductions.count / shape.layers == (4 if recompute == "none" else 6)
    assert reductions.payload == 4 * 2048 * 6144 * 2


def test_sequence_parallelism_sends_the_same_bytes():
    """Korthikanti et al., 2022, section 4.2.2: an all-reduce is a reduce-scatter and an all-gather."""
    shape, job, cluster = shape_of(GPT_22B), Job(2048, 4, 1), make_cluster("a100-80gb", 8)
    sent = [
        in_bytes(find_busiest(make_stages(shape, layout, job), layout, job, cluster), "tp")
        for layout in (Layout(tp=8), Layout(tp=8, sequence_parallel=True))
    ]
    assert sent[0] == sent[1]


def test_groups_that_leave_a_node_share_its_adapters():
    """Eight ranks of one group in a node drive all eight adapters, one rank drives one."""
    cluster = make_cluster("h100-80gb", 64)
    e, nic = cluster.gpu.efficiency, cluster.between.bandwidth
    wide = make_groups(Layout(dp=64), cluster)["dp"]
    narrow = make_groups(Layout(tp=8, dp=8), cluster)["dp"]
    assert narrow.bandwidth == pytest.approx(nic * e.network)
    assert wide.bandwidth == pytest.approx(min(8 * nic * e.network, cluster.inside.bandwidth * e.link))
    assert make_groups(Layout(tp=8, dp=8), cluster)["tp"].link.name == "nvlink4"


# ---- context and experts --------------------------------------------------------------------------------------------

GPT_7B = {"layers": 32, "hidden": 4096, "heads": 32, "ffn_hidden": 16384, "vocab": 50304}
MIXTRAL = {**LLAMA_8B, "vocab": 32000, "experts": 8, "top_k": 2}


def transfers(numbers, layout, job, axis, gpus=None):
    shape, cluster = shape_of(numbers), make_cluster("h100-80gb", gpus or layout.gpus)
    found = find_busiest(make_stages(shape, layout, job), layout, job, cluster)
    return [t for t in found if t.axis == axis]


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("numbers", [GPT_7B, LLAMA_8B])
def test_a_ring_sends_keys_and_values_to_every_other_rank(numbers, ranks):
    """Liu et al., 2023, section 3: each of N - 1 times a rank sends its part of keys and values, 4 b c h bytes in 16
    bits where all heads have their own; backward once more, and with the gradients of both."""
    (ring,) = transfers(numbers, Layout(cp=ranks), Job(8192, 1, 1), "cp")
    part, width = 8192 / ranks, 128 * numbers.get("kv_heads", 32)
    assert ring.bytes == pytest.approx(3 * 32 * (ranks - 1) * 2 * 2 * part * width)


@pytest.mark.parametrize("ranks", [2, 8])
def test_ulysses_exchanges_four_times_its_activations(ranks):
    """Jacobs et al., 2023, section 3.2: 4 N h / P elements per layer and link, of which a rank keeps one part of P."""
    (exchange,) = transfers(GPT_7B, Layout(cp=ranks, context="ulysses"), Job(8192, 1, 1), "cp")
    assert exchange.kind == "all_to_all"
    assert exchange.bytes == pytest.approx(2 * 32 * 2 * 4 * 8192 * 4096 / ranks * (ranks - 1) / ranks)


def test_ulysses_sends_less_and_less_where_a_ring_sends_ever_more():
    """The same paper, table 2: with more ranks the exchange shrinks; what a ring's rank sends grows to all keys."""
    ring, exchange = (
        [in_bytes(transfers(GPT_7B, Layout(cp=n, context=kind), Job(32768, 1, 1), "cp"), "cp") for n in (2, 4, 8)]
        for kind in ("ring", "ulysses")
    )
    assert ring == sorted(ring)
    assert exchange[0] > exchange[2]


def test_a_hybrid_exchanges_in_its_groups_and_rings_a_part_of_the_heads():
    """Of 8 ranks 4 share heads: Ulysses sends 3/4 of its part, a ring of two the keys of a quarter of the heads once.
    Rings go over the slower links, as neighbours share heads."""
    found = transfers(GPT_7B, Layout(cp=8, context="hybrid:4"), Job(8192, 1, 1), "cp")
    exchange, ring = sorted(found, key=lambda t: t.kind, reverse=True)
    keys = 2 * 2 * 8192 * 4096
    assert exchange.bytes == pytest.approx(2 * 32 * 2 * keys / 8 * 3 / 4)
    assert ring.bytes == pytest.approx(3 * 32 * keys / 4 / 2)


@pytest.mark.parametrize("ranks", [2, 8])
def test_keys_gathered_at_once_are_as_many_as_in_a_ring(ranks):
    """Llama 3 (2024), section 3.3.2: an all-gather of keys and values; backward again, and their gradients reduced."""
    kinds = ("ring", "allgather")
    ring, gathered = (transfers(LLAMA_8B, Layout(cp=ranks, context=k), Job(8192, 1, 1), "cp") for k in kinds)
    assert {t.kind for t in gathered} == {"all_gather", "reduce_scatter"}
    assert in_bytes(ring, "cp") == pytest.approx(in_bytes(gathered, "cp"))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_experts_exchange_tokens_twice_each_way(ranks):
    """GShard (Lepikhin et al., 2020, section 3.2), DeepSpeed-MoE (Rajbhandari et al., 2022): dispatch, combine in
    the forward, both again backward; each moves top_k copies of every token, (E - 1) / E of them to other ranks."""
    (exchange,) = transfers(MIXTRAL, Layout(dp=ranks, ep=ranks, zero_stage=1), Job(4096, 1, 1), "ep")
    assert exchange.count == 4 * 32
    assert exchange.payload == 2 * 4096 * 4096 * 2
    assert exchange.bytes == pytest.approx(4 * 32 * (ranks - 1) / ranks * exchange.payload)


# ---- offloading -----------------------------------------------------------------------------------------------------


def test_zero_offload_moves_four_bytes_per_parameter_and_step():
    """Ren et al., 2021, section 3: 16-bit gradients down, 16-bit weights up, the least that any split of the work has;
    16 of 18 bytes of the states are on the host."""
    job, cluster = Job(1024, 1, 1, offload="cpu"), make_cluster("h100-80gb", 1)
    down = offload_seconds(1e9, job, cluster, backward=0.0)["gradients to the host"] * cluster.gpu.host.pcie
    assert (down, job.stored) == (2e9, 2)
    assert count_host_bytes(1e9, job) == 14e9  # 16-bit gradient, fp32 weight and two moments
    assert count_nvme_bytes(1e9, job) == 0


@pytest.mark.parametrize(("billions", "seconds"), [(1, 0.22), (2, 0.51), (4, 1.03), (8, 2.41), (10, 2.57)])
def test_adam_of_the_host(billions, seconds):
    """The same, table 4, on two Xeons: the time per parameter is that of the memory it reads and writes."""
    cluster = make_cluster("a100-80gb", 1, 1)
    found = offload_seconds(billions * 1e9, Job(1024, 1, 1, offload="cpu"), cluster, backward=10.0)
    assert found["optimizer"] == pytest.approx(seconds, rel=0.25)
    assert found["gradients to the host"] == 0


def test_arithmetic_intensity_of_nvme():
    """ZeRO-Infinity (Rajbhandari et al., 2021), section 4.1: optimizer states of 16 bytes are read and written once a
    step, so 8 x batch x seq FLOPs per parameter meet 32 bytes: batch x seq / 4. Ours keeps the gradient in memory."""
    moved = count_nvme_bytes(1.0, Job(1024, 2, 1, offload="nvme"))
    assert moved == 2 * 12
    assert 8 * 2 * 1024 / (moved + 2 * 4) == 2 * 1024 / 4


def test_all_ranks_of_a_node_share_its_memory():
    job = Job(1024, 1, 1, offload="cpu")
    one, eight = (offload_seconds(1e9, job, make_cluster("h100-80gb", n), 0.0) for n in (1, 8))
    assert eight["optimizer"] == pytest.approx(8 * one["optimizer"])
    assert eight["gradients to the host"] == one["gradients to the host"] > 0


# ---- activations (arXiv:2205.05198) ---------------------------------------------------------------------------------


def per_sbh(layout, scores=True, heads=96, hidden=12288, seq=2048):
    """The planner's terms, and what flash attention without dropout spares: scores and two masks, for its sums.

    The paper's selective recomputation keeps all but the scores.
    """
    block = make_dense_block(hidden, heads, heads, 4 * hidden, gated=False)
    masks = 2 / (layout.tp if layout.sequence_parallel else 1)
    unfused = (5 * heads * seq * scores - 4 * heads) / hidden / layout.tp
    return count_kept_bytes(block, hidden, layout, Job(seq, 1, 1)) / hidden + masks + unfused


def test_activations_of_a_layer_by_table_2():
    scores = 5 * 96 * 2048 / 12288
    assert per_sbh(Layout()) == pytest.approx(34 + scores)
    assert per_sbh(Layout(tp=8)) == pytest.approx(10 + 24 / 8 + scores / 8)
    assert per_sbh(Layout(tp=8, sequence_parallel=True)) == pytest.approx((34 + scores) / 8)
    assert per_sbh(Layout(tp=8, sequence_parallel=True), scores=False) == pytest.approx(34 / 8)
    block = make_dense_block(12288, 96, 96, 4 * 12288, gated=False)
    assert count_kept_bytes(block, 12288, Layout(), Job(2048, 1, 1, "full")) / 12288 == pytest.approx(2)


@pytest.mark.parametrize(
    ("numbers", "layout", "micro_batch", "selective", "nothing"),  # GiB: table 5 and figure 1
    [
        (GPT_22B, {"tp": 8}, 4, 9.5625, 59.25),
        (GPT_175B, {"tp": 8, "pp": 8, "virtual_stages": 3, "schedule": "interleaved_1f1b"}, 1, 12.35, 66.84),
    ],
)
def test_activations_of_a_rank_by_table_5(numbers, layout, micro_batch, selective, nothing):
    """Under the interleaved schedule the first rank holds L (1 + (p - 1) / (p v)) layers' worth."""
    for is_selective, expected in ((True, selective), (False, nothing)):
        sizes = Layout(**layout, sequence_parallel=is_selective)
        layers = count_live_forwards(sizes, Job(2048, micro_batch, 64))[0] * numbers["layers"]
        layers /= sizes.pp * sizes.virtual_stages
        kept = per_sbh(sizes, not is_selective, numbers["heads"], numbers["hidden"]) * numbers["hidden"]
        assert layers * kept * 2048 * micro_batch / GIB == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("numbers", "ranks"), [(GPT_22B, 8), (GPT_175B, 64)])
def test_states_of_a_rank_by_table_5(numbers, ranks):
    """18 bytes per weight of the layers' matrices, with fp32 gradients: 45.56 GiB for both models."""
    weights = sum(m.parameters for block in shape_of(numbers).blocks for m in block.matrices)
    states = zero_states(weights / ranks, 1, 0, StateBytes(2, 4, 12))
    assert sum(states.values()) / GIB == pytest.approx(45.56, abs=0.01)


# ---- pipeline -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "batches"), [(2, 2), (4, 4), (4, 12), (8, 64)])
def test_bubble_of_1f1b(ranks, batches):
    """(p - 1) / (m + p - 1) of the whole, Narayanan et al., 2021; m is continued beyond what is simulated."""
    layout, job = Layout(pp=ranks), Job(2048, 1, batches)
    duration, bubble = compute_pipeline_seconds(layout, job, [(1.0, 2.0)] * ranks, 0.0)
    assert duration == pytest.approx(3 * (batches + ranks - 1))
    assert bubble == pytest.approx((ranks - 1) / (batches + ranks - 1))


@pytest.mark.parametrize(("ranks", "batches"), [(2, 2), (3, 7), (4, 4), (8, 20)])
def test_own_order_of_1f1b_is_torchs(ranks, batches):
    assert make_1f1b_order(ranks, batches) == order("1f1b", ranks, 1, batches)


def test_model_flops_are_six_per_parameter_and_token():
    """Kaplan et al., 2020, with attention as in PaLM (Chowdhery et al., 2022, appendix B): 6 N + 12 L h s."""
    shape = shape_of(GPT_175B)
    matrices = shape.parameters - shape.other_parameters - sum(block.others for block in shape.blocks)
    assert 3 * shape.forward_flops(2048, full_attention=True) == pytest.approx(6 * matrices + 12 * 96 * 12288 * 2048)


def test_mfu_is_flops_over_peak():
    found = predict(
        model=GPT_175B, gpu="a100-80gb", layout={"tp": 8, "pp": 8}, seq=2048, micro_batch=1, global_batch=64
    )
    flops = 3 * found.shape.forward_flops(2048, full_attention=True) * 2048 * 64
    assert found.mfu == pytest.approx(flops / found.step_time_s / 64 / 312e12)
