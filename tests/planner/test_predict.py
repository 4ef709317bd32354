"""`predict` as a call: names, defaults, refusals, and that it reacts to each argument as it should."""

import dataclasses
import math

import pytest

from hf_parallel.ask.config import SpecError
from hf_parallel.planner import find_gpu, predict
from hf_parallel.planner.hardware import find_link, make_cluster, read_catalogue
from hf_parallel.planner.layout import Job, Layout
from hf_parallel.planner.ledger import EXPOSED, block_transfers, make_groups, step_transfers
from hf_parallel.planner.pipeline import compute_pipeline_seconds, make_stages
from tests.models import LLAMA_8B, LLAMA_8B_CONFIG
from tests.refusals import pattern_of_refusal

CALL = {"model": LLAMA_8B, "gpu": "h100-80gb", "gpus": 64, "seq": 4096, "micro_batch": 1, "global_batch": 512}


def changed(**changes):
    return predict(**{**CALL, "layout": {"zero_stage": 3}, **changes})


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("H100-80GB", "h100-80gb"),
        ("NVIDIA H100 SXM5 80GB", "h100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("H100-96GB-HBM2e-500W", "h100-96gb-hbm2e-500w"),
        ("A800-80GB", "a800-80gb"),
        ("H200-141GB", "h200-141gb"),
        ("B200", "b200-180gb"),
        ("MI300X", "mi300x-192gb"),
    ],
)
def test_names_of_gpus(name, own):
    assert find_gpu(name).name == own


def test_an_unknown_gpu_or_link_is_answered_with_the_nearest():
    with pytest.raises(SpecError, match=pattern_of_refusal("gpu=h10-80gb", works="h100-80gb")):
        find_gpu("h10-80gb")
    with pytest.raises(SpecError, match=pattern_of_refusal("network=infiniband", works="infiniband-ndr")):
        find_link("infiniband")


def test_the_catalogue_is_whole():
    """Every entry resolves: source, links, efficiencies, at least bf16 and fp32."""
    for name in read_catalogue()["gpus"]:
        gpu = find_gpu(name)
        assert gpu.source, name
        assert {"bf16", "fp32"} <= set(gpu.peaks), name
        assert find_link(gpu.scale_up).bandwidth > find_link(gpu.scale_out).bandwidth, name
    assert all(find_link(name).source for name in read_catalogue()["links"])


def test_what_is_missing_or_none_gets_its_default():
    nothing = dict.fromkeys(("tp", "pp", "cp", "ep", "virtual_stages", "sequence_parallel", "dp"))
    plain = predict(**CALL, layout={"zero_stage": 3, **nothing}, recompute=None, precision=None, lora=None)
    assert plain.step_time_s == changed().step_time_s
    assert (plain.layout.dp, plain.layout.tp, plain.job.micro_batches) == (64, 1, 8)


def test_a_config_is_as_good_as_numbers():
    given, counted = changed(), changed(model=LLAMA_8B_CONFIG)
    assert counted.step_time_s == pytest.approx(given.step_time_s, rel=1e-3)
    assert counted.memory_gib == pytest.approx(given.memory_gib, rel=1e-3)


def test_parts_add_up():
    found = changed(layout={"tp": 2, "pp": 4, "zero_stage": 1, "sequence_parallel": True})
    assert sum(found.breakdown.time.values()) == pytest.approx(found.step_time_s)
    assert sum(found.breakdown.memory.values()) == pytest.approx(found.memory_gib)
    assert found.tokens_per_s_per_gpu * 64 * found.step_time_s == pytest.approx(512 * 4096)
    assert set(found.breakdown.bytes_by_axis) == {"tp", "pp", "dp"}
    assert len(found.breakdown.ranks) == 4
    assert found.cost_per_billion_tokens(2.0) == pytest.approx(2e9 / 3600 / found.tokens_per_s_per_gpu)


def test_recomputation_costs_time_and_saves_memory():
    none, selective, full = (changed(recompute=kind, micro_batch=2) for kind in ("none", "selective", "full"))
    assert none.step_time_s < selective.step_time_s < full.step_time_s
    assert none.memory_gib > selective.memory_gib > full.memory_gib


def test_sharding_saves_memory():
    needed = [changed(layout={"zero_stage": stage}, recompute="full").memory_gib for stage in range(4)]
    assert needed[0] > needed[1] > needed[2] > needed[3]


def test_adapters_need_no_gradients_of_the_rest():
    whole, lora = changed(layout={"zero_stage": 2}), changed(layout={"zero_stage": 2}, lora=True)
    assert lora.breakdown.memory["optimizer"] < whole.breakdown.memory["optimizer"] / 20
    assert lora.breakdown.bytes_by_axis["dp"] < whole.breakdown.bytes_by_axis["dp"] / 20
    assert lora.step_time_s < whole.step_time_s


@pytest.mark.parametrize("engine", ["standard", "hf_parallel"])
def test_fp32_weights_under_autocast(engine):
    """They are kept as fp32 and multiplied as bf16: by the book they travel as fp32, and are copied for a product.

    This engine gathers them in bf16, and sums gradients in fp32 whatever the weights are.
    """
    bf16, mixed, fp32 = (changed(precision=name, engine=engine) for name in ("bf16", "mixed", "fp32"))
    sent = [sum(found.breakdown.bytes_by_axis.values()) for found in (bf16, mixed, fp32)]
    assert sent[1] == (sent[2] if engine == "standard" else sent[0])
    assert sent[2] == 2 * sent[0] if engine == "standard" else 1.4 * sent[0] < sent[2] < 2 * sent[0]
    assert bf16.step_time_s <= mixed.step_time_s < fp32.step_time_s
    assert fp32.breakdown.time["head"] > 1.5 * mixed.breakdown.time["head"] == 1.5 * bf16.breakdown.time["head"]
    assert ("autocast" in mixed.breakdown.time) == (engine == "standard")
    copies = sum(matrix.flops for block in mixed.shape.blocks for matrix in block.matrices) / 2**30  # 2 bytes each
    assert mixed.breakdown.memory["optimizer"] == fp32.breakdown.memory["optimizer"]
    assert engine == "hf_parallel" or mixed.memory_gib > copies + mixed.breakdown.memory["weights"]


@pytest.mark.parametrize("engine", ["standard", "hf_parallel"])
@pytest.mark.parametrize(
    "layout",
    [
        {"zero_stage": 0},
        {"zero_stage": 1},
        {"zero_stage": 3, "dp_replicate": 8},
        {"tp": 8, "zero_stage": 2},
        {"tp": 8, "zero_stage": 3, "sequence_parallel": True},
        {"cp": 4, "zero_stage": 3},
        {"cp": 4, "zero_stage": 3, "context": "ulysses"},
        {"ep": 8, "zero_stage": 3},
    ],
    ids=str,
)
def test_bytes_and_seconds_are_of_the_same_transfers(engine, layout):
    """Where nothing hides behind compute, a step waits for exactly what the breakdown lists."""
    gpu = find_gpu("h100-80gb")
    nothing = dict.fromkeys(("hidden", "hidden_gradients", "contention", "wait_us"), 0.0)
    gpu = dataclasses.replace(gpu, efficiency=dataclasses.replace(gpu.efficiency, **nothing))
    model = LLAMA_8B | ({"experts": 8, "top_k": 2} if "ep" in layout else {})
    found = changed(gpu=gpu, model=model, layout=layout, engine=engine, recompute="full")
    listed = sum(transfer.seconds for transfer in found.breakdown.communication)
    kinds = ("gradients' reduction", "gathering updated weights")
    waited = sum(s for kind, s in found.breakdown.time.items() if kind in kinds or "communication" in kind)
    assert waited == pytest.approx(listed)


def test_products_in_fp8_cast_their_inputs_and_gradients():
    """A byte written twice for every two that are read; nothing of it in 16 bits."""
    fp8, bf16 = (changed(engine="transformer_engine", precision=name, layout={}) for name in ("fp8", "bf16"))
    numbers = sum(m.count * (m.inputs + m.outputs) for block in fp8.shape.blocks for m in block.matrices)
    gpu, tokens = fp8.cluster.gpu, fp8.job.tokens(fp8.layout) * fp8.job.micro_batches
    seconds = 4 * numbers * tokens / (gpu.bandwidth * gpu.efficiency.memory)
    assert fp8.breakdown.time["casts to fp8"] == pytest.approx(seconds)
    assert "casts to fp8" not in bf16.breakdown.time


def test_every_micro_batch_reads_and_writes_the_sum_of_gradients():
    """Products that add to it by themselves spare the gradient of their own, 2 of 10 bytes, not the sum."""
    apart, fused = (changed(engine=engine, layout={}) for engine in ("megatron", "transformer_engine"))
    assert fused.job.micro_batches > 1
    found = (p.breakdown.time["accumulating gradients"] for p in (fused, apart))
    assert math.isclose(next(found) / next(found), 8 / 10)


@pytest.mark.parametrize(("engine", "hides"), [("transformer_engine", True), ("standard", False)])
def test_megatron_sends_behind_the_micro_batches_of_other_stages(engine, hides):
    """With stages of an interleaved pipeline there is more to hide behind, of this engine alone."""
    one, four = (
        changed(engine=engine, layout={"pp": 4, "zero_stage": 1, "virtual_stages": stages}, network="ethernet-25g")
        for stages in (1, 4)
    )
    for kind in ("gradients' reduction", "gathering updated weights"):
        early, late = (p.breakdown.time[kind] for p in (one, four))
        assert late < 0.98 * early if hides else late == pytest.approx(early)


@pytest.mark.parametrize(("layout", "axis", "doublings"), [({}, "dp", 3), ({"tp": 8}, "tp", 0), ({"pp": 8}, "pp", 0)])
def test_a_network_that_tapers_is_slower_for_groups_of_many_nodes(layout, axis, doublings):
    """By `taper` for each doubling of the nodes that a ring spans; not between stages, nor inside a node."""
    gpu = find_gpu("h100-80gb")
    tapered = dataclasses.replace(gpu, efficiency=dataclasses.replace(gpu.efficiency, taper=0.5))
    sizes = Layout(dp=64 // math.prod(layout.values()), **layout)
    flat, slow = (make_groups(sizes, make_cluster(g, 64))[axis].bandwidth for g in (gpu, tapered))
    assert flat / slow == pytest.approx(1 + 0.5 * doublings)


def test_an_engine_that_accumulates_reduces_once_per_step():
    """FSDP2 without synchronisation between the calls of a step; its seconds say so as its bytes do."""
    few, many = (changed(engine="hf_parallel", global_batch=64 * count, layout={"zero_stage": 3}) for count in (1, 8))
    for kind, factor in (("all_gather", 8), ("reduce_scatter", 1)):
        one, all_ = (sum(t.bytes for t in p.breakdown.communication if t.kind == kind) for p in (few, many))
        assert all_ == pytest.approx(factor * one)
    slow = [changed(engine=engine, network="ethernet-25g").step_time_s for engine in ("hf_parallel", "standard")]
    assert slow[0] < 0.8 * slow[1]


@pytest.mark.parametrize(("schedule", "drains"), [("1f1b", 1), ("zbv_zero_bubble", 1), ("gpipe", 4)])
def test_batches_of_a_step_run_at_once(schedule, drains):
    """Unless the schedule would keep the activations of all: then the pipeline drains after each."""
    layout = Layout(pp=4, schedule=schedule, virtual_stages=2 if schedule.startswith("zbv") else 1)
    number = layout.pp * layout.virtual_stages

    def seconds(batches: int, calls: int, engine: str) -> tuple[float, float]:
        job = Job(seq=8, micro_batch=1, micro_batches=8 * batches, calls=calls, engine=engine)
        return compute_pipeline_seconds(layout, job, number * [(1.0, 2.0)], 0.0)

    apart, one = seconds(4, 4, "standard"), seconds(4, 1, "hf_parallel")
    assert apart == pytest.approx((4 * seconds(1, 1, "standard")[0], apart[1]))
    assert seconds(4, 4, "hf_parallel") == (one if drains == 1 else apart)
    assert one[0] < apart[0]


@pytest.mark.parametrize(("schedule", "runs"), [("1f1b", 1), ("chimera", 1), ("gpipe", 4)])
def test_batches_that_run_at_once_meet_once(schedule, runs):
    """A run ends with the tied embedding's gradient, and with a loss for each batch in it."""
    layout = Layout(pp=4, schedule=schedule)
    job = Job(seq=8, micro_batch=1, micro_batches=16, calls=4, engine="hf_parallel")
    shape = dataclasses.replace(changed().shape, tied=True)
    stages = make_stages(shape, layout, job)
    sent = {t.what: t for t in step_transfers([stages[0]], layout, job, changed().cluster)}
    assert sent["gradients of the tied embedding"].count == sent["loss"].count == runs
    assert sent["loss"].payload * runs == 4 * 4  # bytes
    assert ("weights to their mirror" in sent) == (schedule == "chimera")


def test_names_of_precisions():
    assert changed(precision="bf16-mixed").job.precision == "mixed"
    assert changed(precision="amp_bf16").job.precision == "bf16"
    fp16 = changed(precision="fp16", engine="hf_parallel")
    assert fp16.memory_gib == changed(precision="mixed", engine="hf_parallel").memory_gib


def test_what_a_slow_network_does():
    """ZeRO-3 over Ethernet gathers weights for ever; replicas that shard inside nodes do not."""
    fast, slow = (changed(network=name).step_time_s for name in ("infiniband-ndr", "ethernet-25g"))
    assert slow > 3 * fast
    inside = changed(network="ethernet-25g", layout={"zero_stage": 3, "dp_replicate": 8})
    assert inside.step_time_s < slow / 3


def test_long_pipelines_need_micro_batches():
    few, many = (changed(layout={"pp": 8, "zero_stage": 1}, global_batch=batch) for batch in (64, 1024))
    assert few.bubble > 0.4
    assert many.bubble < 0.32  # the last stage has the head on top of its layers


def test_experts_spread():
    experts = {"layers": 48, "hidden": 2048, "heads": 32, "kv_heads": 4, "ffn_hidden": 768, "vocab": 151936}
    experts |= {"experts": 128, "top_k": 8, "params": 30.5e9}
    alone, spread = (changed(model=experts, layout={"zero_stage": 1, "ep": ep}, recompute="full") for ep in (1, 8))
    assert spread.memory_gib < alone.memory_gib
    assert spread.breakdown.bytes_by_axis["ep"] > 0


def test_explanation_names_sources_and_numbers():
    text = changed(layout={"tp": 2, "pp": 4, "zero_stage": 1}).explain()
    for part in ("arXiv:1910.02054", "arXiv:2205.05198", "NVIDIA H100 data sheet", "nvlink4", "simulated bubble"):
        assert part in text


def test_explanation_says_what_tp_leaves_whole():
    layout = {"tp": 2, "dp": 32, "sequence_parallel": True}
    text = changed(layout=layout, attention="masked", engine="hf_parallel").explain()
    (mask,) = [line for line in text.splitlines() if "mask of queries by keys" in line]
    assert mask.endswith("whole on each tp rank")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout": {"tp": 3}}, "tp=3 x pp=1 x cp=1 x dp=21 = 63, but there are 64 GPUs"),
        ({"layout": {"tpp": 2}}, "tpp is no key; did you mean tp"),
        ({"layout": {"pp": 64}}, "32 layers do not fill them; 32 works"),
        ({"layout": {"zero_stage": 4}}, "zero_stage=4: not one of"),
        ({"recompute": "some"}, "recompute=some: not one of none, selective, full, every:N"),
        ({"precision": "int4"}, "precision=int4: not one of"),
        ({"eight_bit_scaling": "rows"}, "eight_bit_scaling=rows: not one of tensorwise"),
        ({"gpus": 0}, "must be one at least"),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(SpecError, match=message.replace("(", r"\(")):
        changed(**changes)


@pytest.mark.parametrize(("compiled", "waited"), [(False, 7), (True, 4)])
def test_overlapped_collectives(compiled, waited):
    """Of a layer's eight: half of the two outputs of the forward; in compiled layers half of all. The same bytes."""
    call = {"micro_batch": 4, "global_batch": 4, "gpus": 8, "engine": "hf_parallel", "compiled": compiled}
    layout = {"tp": 8, "sequence_parallel": True}
    plain, over = (changed(layout={**layout, "tp_overlap": over}, **call) for over in (False, True))
    assert plain.breakdown.bytes_by_axis == pytest.approx(over.breakdown.bytes_by_axis)
    counts = []
    for found in (plain, over):
        transfers = block_transfers(found.shape.blocks[0], 4096, found.layout, found.job, found.cluster)
        counts.append(sum(t.count for t in transfers if t.behind == EXPOSED))
    assert counts == [8, waited]
    assert over.breakdown.time["tp communication"] < plain.breakdown.time["tp communication"]


def test_torchtitan_gathers_sequences_in_8_bits():
    """Inputs and gradients of outputs in one byte where one scale is for all; rows are rounded after the gather."""
    call = {
        "layout": {"tp": 8, "sequence_parallel": True, "zero_stage": 3},
        "precision": "fp8",
        "engine": "torchtitan",
    }

    def count(scaling):
        transfers = changed(**call, eight_bit_scaling=scaling).breakdown.communication
        return sum(t.bytes for t in transfers if t.axis == "tp" and t.kind == "all_gather")

    assert count("rowwise") == pytest.approx(2 * count("tensorwise"))
    casts = [
        changed(**call, eight_bit_scaling=scaling).breakdown.time["casts to fp8"]
        for scaling in ("tensorwise", "rowwise", "rowwise_with_gw_hp")
    ]
    assert casts[1] == pytest.approx(2 * casts[2])
    assert casts[1] > 2.5 * casts[0]  # and of what is gathered an eighth


def test_a_sum_of_16_bits_is_read_and_written_in_16_bits():
    """Six bytes per gradient and micro-batch: one read, the sum read and written; ten where the sum is in fp32."""
    where = {"gpu": "a100-80gb", "gpus": 8, "layout": {"zero_stage": 1}, "seq": 2048, "global_batch": 32}
    took = {
        sums: predict(model=LLAMA_8B, micro_batch=1, gradients=sums, **where).breakdown.time["accumulating gradients"]
        for sums in ("bf16", "fp32", "both")
    }
    assert took["bf16"] == pytest.approx(0.6 * took["fp32"], rel=0.03)  # stragglers aside
    assert took["both"] == pytest.approx(took["fp32"])
