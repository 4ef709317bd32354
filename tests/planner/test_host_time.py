"""Seconds of Transformers' layers without a compiler: Python launches each kernel; the larger of host and GPU counts.

Measured on an H100 and an H200 (docs/reference/gpu.md): steps of one process's share, whose collectives move nothing.
"""

import dataclasses

import pytest

from benchmarks import published
from hf_parallel.planner import find_gpu, predict
from hf_parallel.planner.hardware import Cluster, Link
from tests.models import LLAMA_8B

LLAMA_1B = {
    "layers": 16,
    "hidden": 2048,
    "heads": 32,
    "kv_heads": 8,
    "ffn_hidden": 8192,
    "vocab": 128256,
    "tied": True,
}


MIXTURE_30B = {
    **{"layers": 48, "hidden": 2048, "heads": 32, "kv_heads": 4, "head_dim": 128, "vocab": 151936},
    **{"ffn_hidden": 768, "experts": 128, "top_k": 8},
}


def without_links(gpus, kind="h100-80gb", **changes):
    """GPUs whose links take no time."""
    gpu = find_gpu(kind)
    efficiency = dataclasses.replace(gpu.efficiency, wait_us=0.0, contention=0.0, **changes)
    link = Link("nothing", 1e18, 0.0)
    return Cluster(dataclasses.replace(gpu, efficiency=efficiency), gpus, 8, link, link)


def step(model, layout, gpus, rows, seq, micro_batches=1, kind="h100-80gb", **changes):
    """A step of a data rank with `rows` sequences in all of its micro-batches."""
    data = gpus // layout.get("tp", 1) // layout.get("pp", 1) // layout.get("cp", 1)
    batch = {"micro_batch": rows // micro_batches, "global_batch": rows * data}
    given = {"engine": "hf_parallel", "attention": "sdpa", **batch, **changes}
    return predict(model=model, gpu=without_links(gpus, kind), gpus=gpus, layout=layout, seq=seq, **given)


@pytest.mark.parametrize(
    ("model", "layout", "gpus", "rows", "seq", "milliseconds"),
    [
        (LLAMA_1B, {}, 1, 4, 2048, 184),
        (LLAMA_1B, {"zero_stage": 3}, 8, 4, 2048, 181),
        (LLAMA_1B, {"tp": 2, "sequence_parallel": True}, 2, 4, 2048, 136),
        (LLAMA_8B, {"zero_stage": 3}, 8, 1, 4096, 463),
        (LLAMA_8B, {"tp": 8, "sequence_parallel": True}, 8, 4, 4096, 249),
    ],
)
def test_measured_steps(model, layout, gpus, rows, seq, milliseconds):
    found = step(model, layout, gpus, rows, seq)
    assert found.step_time_s == pytest.approx(milliseconds * 1e-3, rel=0.15)


@pytest.mark.parametrize(
    ("model", "layout", "gpus", "rows", "seq", "milliseconds"),
    [
        (LLAMA_1B, {}, 1, 4, 2048, 170),
        (LLAMA_1B, {"zero_stage": 3}, 8, 4, 2048, 192),  # 175 the day before
        (LLAMA_1B, {"tp": 2, "sequence_parallel": True}, 2, 4, 2048, 123),
        (LLAMA_8B, {"zero_stage": 3}, 8, 1, 4096, 463),
        (LLAMA_8B, {"tp": 8, "sequence_parallel": True}, 8, 4, 4096, 299),
        (MIXTURE_30B, {"zero_stage": 3}, 8, 1, 4096, 757),  # 322 where the kernels of routing are not counted
    ],
)
def test_steps_of_an_h200(model, layout, gpus, rows, seq, milliseconds):
    """The second H200 measured; no number was fitted on either but the kernels of a mixture's block."""
    found = step(model, layout, gpus, rows, seq, kind="h200-141gb")
    assert found.step_time_s == pytest.approx(milliseconds * 1e-3, rel=0.16)


@pytest.mark.parametrize(
    ("model", "layout", "rows", "seq", "milliseconds"),
    [
        (LLAMA_1B, {"zero_stage": 3}, 4, 2048, 158),  # 175 without a compiler
        (LLAMA_8B, {"zero_stage": 3}, 1, 4096, 394),  # 437
        (LLAMA_8B, {"tp": 8, "sequence_parallel": True}, 4, 4096, 233),  # 312
    ],
)
def test_compiled_layers_of_an_h200(model, layout, rows, seq, milliseconds):
    """`compile=regional`: fused passes over memory, fewer launches."""
    found = step(model, layout, 8, rows, seq, kind="h200-141gb", compiled=True)
    assert found.step_time_s == pytest.approx(milliseconds * 1e-3, rel=0.15)
    assert found.memory_gib == step(model, layout, 8, rows, seq, kind="h200-141gb").memory_gib


def test_copies_of_fsdp2():
    """8 GPUs: weights read and written twice, gradients of 16 bits to a sum in 32; an eighth of both once more."""
    parameters, gpu = 8.03e9, find_gpu("h200-141gb")
    kinds = step(LLAMA_8B, {"zero_stage": 3}, 8, 1, 4096, kind="h200-141gb").breakdown.time
    gathered, reduced = 2 * 2 * (2 + 2 / 8), 2 + 4 + 4 * 2 / 8
    ends = 2 * (2 + 2 / 8) * 2 * 128256 * 4096  # embedding and head are gathered once
    expected = (parameters * (gathered + reduced) - ends) / (gpu.bandwidth * gpu.efficiency.memory)
    assert kinds["ZeRO-3 copies"] == pytest.approx(expected, rel=0.01)
    assert "ZeRO-3 copies" not in step(LLAMA_8B, {"tp": 8}, 8, 1, 4096).breakdown.time


def test_a_pipeline_whose_ranks_wait_for_python():
    """8B, tp=4,pp=2, four micro-batches: measured 537 ms for the first stage, of which the GPU worked 236."""
    layout = {"tp": 4, "pp": 2, "sequence_parallel": True}
    time = step(LLAMA_8B, layout, 8, 4, 4096, micro_batches=4).breakdown.time
    alone = {kind: seconds for kind, seconds in time.items() if kind not in ("bubble", "tp communication")}
    assert sum(alone.values()) == pytest.approx(0.537, rel=0.1)
    worked = sum(seconds for kind, seconds in alone.items() if not kind.startswith("host"))
    assert worked == pytest.approx(0.236, rel=0.1)


def test_the_larger_of_host_and_gpu_counts():
    """Longer micro-batches give the GPU more than Python needs; then no second is the host's."""
    short, long = (step(LLAMA_1B, {}, 1, rows, 512).breakdown.time for rows in (1, 64))
    assert short["host"] > 0.02
    assert "host" not in long
    seconds = sum(s for kind, s in short.items() if kind not in ("optimizer", "host, per step"))
    assert seconds == pytest.approx(16 * 150 * 40e-6, rel=1e-6)


def test_what_launches_more_kernels():
    """tp, shards, adapters, and layers computed again: seconds of a step that waits for Python."""

    def seconds(layout, gpus=1, **changes):
        time = step(LLAMA_1B, layout, gpus, 1, 64, **changes).breakdown.time
        return time["host"] + sum(s for kind, s in time.items() if not kind.startswith(("host", "optimizer", "grad")))

    plain = seconds({})
    assert seconds({"tp": 2}, 2) / plain == pytest.approx(190 / 150, rel=1e-3)
    assert seconds({"zero_stage": 3}, 2) / plain == pytest.approx(167 / 150, rel=1e-3)
    ring, heads = {"cp": 4, "zero_stage": 3}, {"cp": 4, "context": "ulysses", "zero_stage": 3}
    assert seconds(ring, 4) / plain == pytest.approx((167 + 22 + 3 * 21) / 150, rel=1e-3)
    assert seconds(heads, 4) / plain == pytest.approx((167 + 35) / 150, rel=1e-3)
    assert seconds({}, lora=16) / plain == pytest.approx((150 + 7 * 11) / 150, rel=1e-3)
    assert seconds({}, recompute="full") / plain == pytest.approx(200 / 150, rel=1e-3)
    mixture = step(MIXTURE_30B, {}, 1, 1, 64).breakdown.time
    by_host = sum(s for kind, s in mixture.items() if kind not in ("optimizer", "host, per step"))
    assert by_host == pytest.approx(48 * (150 + 145) * 40e-6, rel=1e-3)


def test_fused_implementations_do_not_wait_for_python():
    """What Megatron-LM and others published is predicted without these numbers."""
    call = {"model": LLAMA_1B, "gpus": 1, "seq": 64, "micro_batch": 1, "global_batch": 1}
    fused, eager = (predict(gpu="h100-80gb", engine=engine, **call) for engine in ("standard", "transformers"))
    assert eager.step_time_s > 2 * fused.step_time_s
    slower = predict(gpu=without_links(1, eager_us=1e4, eager_passes=10.0, flash=0.01, cudnn=0.01), **call)
    assert slower.step_time_s == predict(gpu=without_links(1), **call).step_time_s


def test_a_published_step_of_a_million_tokens():
    """TRL on 8 H100, one sequence over a ring of all: 380 s. Nothing was fitted on this row."""
    given = {"layers": 36, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn_hidden": 12288, "vocab": 151936}
    row = {**given, "series": "trl_1m", "model": "Qwen3-8B", "gpu_type": "H100-80GB", "gpus": 8, "gpus_per_node": 8}
    row |= {"tp": 1, "pp": 1, "dp": 1, "cp": 8, "ep": 1, "zero_stage": 3, "seq": 2**20}
    row |= {"micro_batch": 1, "global_batch": 1, "recompute": "full", "precision": "bf16"}
    assert published.call(row).step_time_s == pytest.approx(380, rel=0.1)
