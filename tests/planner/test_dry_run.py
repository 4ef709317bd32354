"""A dry run keeps and sends what a real run on four ranks keeps and sends."""

import time

import pytest
import torch
from transformers import LlamaConfig

from hf_parallel.ask.config import SpecError
from hf_parallel.hooks.peft.planned_adapters import plan_four_bit, plan_lora
from hf_parallel.planner.dryrun import dry_run
from hf_parallel.planner.dryrun.world import Shapes, fake_tensors_pass_as_real
from tests import models
from tests.distributed import run, run_alone
from tests.planner.measuring import allocated, measured, measured_in_a_script, measured_with_adapters, numbers

ROWS, LENGTH = 4, 32
STATES = ("parameters", "gradients", "optimizer")
LLAMA_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


def planned(name, spec, rank, accumulation=1, **options):
    """The dry run of a tiny model in a process of its own, in plain numbers."""
    sizes = options.pop("sizes", {})
    given = {"rows": ROWS, "seq": LENGTH, "precision": "fp32", "world_size": 4} | options
    return numbers(dry_run(models.CONFIGS[name](**sizes), spec, rank=rank, accumulation=accumulation, **given))


CASES = [
    ("llama", "dp_shard=4", 1),
    ("llama", "dp_replicate=2,dp_shard=2", 2),
    ("gpt2", "tp=2,dp_shard=2,activation_checkpointing=full", 1),
    ("qwen3", "pp=2,tp=2,pipeline_microbatches=4", 1),
    ("llama", "pp=2,dp_shard=2,pipeline_microbatches=4", 3),
    ("llama", "pp=2,dp_shard=2,pipeline_microbatches=4,pipeline_schedule=interleaved_zero_bubble", 1),
    ("mixtral", "pp=2,dp_shard=2,pipeline_microbatches=4", 1),
]


@pytest.mark.clock
@pytest.mark.parametrize(("name", "spec", "accumulation"), CASES)
def test_bytes_are_those_of_a_real_run(name, spec, accumulation):
    """Weights, gradients, optimizer and every axis' traffic to the byte; the fullest moment within 3 %.

    Real collectives of activations keep their tensors until they are done, which a world without wires cannot know:
    that is what differs under tp and pp. Over data axes alone the fullest moments are equal too, but where a busy
    machine's threads let go of a buffer late.
    """
    over_data = spec.startswith("dp_")
    real = run(measured, 4, name, spec, ROWS, LENGTH, accumulation)
    for rank in (0, 3):
        plan = run_alone(planned, name, spec, rank, accumulation)
        did = real[rank]
        assert plan["traffic"] == did["traffic"]
        for kind in STATES:
            assert plan["kept"][kind] == did["kept"][kind] == did["sums"][kind]
        total = sum(did["peak"].values())
        assert sum(plan["peak"].values()) == pytest.approx(total, rel=1e-12 if over_data else 0.03)


def planned_on_ranks(name, spec, accumulation):
    """The dry runs of the first and the last rank."""
    return {rank: planned(name, spec, rank, accumulation) for rank in (0, 3)}


#: Layout, batches per step, and how often a rank holds its weights and sums of gradients when a step has ended.
SEVERAL = [
    ("pp=4,pipeline_microbatches=4,pipeline_schedule=pipedream_2bw", 1, {0: (2, 1), 3: (2, 2)}),
    ("pp=2,tp=2,pipeline_microbatches=2,pipeline_schedule=pipedream_2bw", 2, {0: (2, 1), 3: (2, 1)}),
    ("pp=2,dp_replicate=2,pipeline_microbatches=4,pipeline_schedule=pipedream_2bw", 1, {0: (2, 1), 3: (2, 1)}),
    ("pp=4,pipeline_microbatches=1,pipeline_schedule=pipedream", 1, {0: (4, 1), 3: (1, 3)}),
    ("pp=4,pipeline_microbatches=4,pipeline_schedule=pipedream", 1, {0: (2, 1), 3: (1, 2)}),
]


@pytest.mark.clock
@pytest.mark.parametrize(("spec", "accumulation", "held"), SEVERAL)
def test_versions_are_those_of_a_real_run(spec, accumulation, held):
    """Without a flush: versions of the weights, sums of gradients and activations in flight when a step has ended."""
    real = run(measured, 4, "llama", spec, ROWS, LENGTH, accumulation)
    for rank, plan in run_alone(planned_on_ranks, "llama", spec, accumulation).items():
        did = real[rank]
        assert plan["traffic"] == did["traffic"]
        assert plan["kept"] == pytest.approx(did["kept"], rel=0.03)
        weights, sums = held[rank]
        assert [plan["kept"][kind] for kind in STATES] == [did["kept"][kind] for kind in STATES]
        assert plan["kept"]["parameters"] == pytest.approx(weights * did["sums"]["parameters"], rel=0.01)
        assert plan["kept"]["gradients"] == sums * did["sums"]["gradients"]
        assert sum(plan["peak"].values()) == pytest.approx(sum(did["peak"].values()), rel=0.03)


@pytest.mark.clock
@pytest.mark.parametrize(
    ("name", "spec", "accumulation"),
    [
        ("llama", "pp=4,pipeline_microbatches=4", 1),
        ("qwen3", "pp=2,tp=2,pipeline_microbatches=4", 2),
    ],
)
def test_copies_are_those_of_a_real_run(name, spec, accumulation):
    """Two directions: a rank holds the mirrored stage beside its own; weights and gradients go to the other one."""
    spec = f"{spec},pipeline_schedule=chimera"
    real = run(measured, 4, name, spec, ROWS, LENGTH, accumulation)
    for rank, plan in run_alone(planned_on_ranks, name, spec, accumulation).items():
        did, mirrored = real[rank], real[3 - rank]
        assert plan["traffic"] == did["traffic"]
        assert [plan["kept"][kind] for kind in STATES] == [did["kept"][kind] for kind in STATES]
        both = did["sums"]["parameters"] + mirrored["sums"]["parameters"]
        assert plan["kept"]["parameters"] == pytest.approx(both, rel=1e-3)  # both have the buffers of positions
        assert plan["kept"]["gradients"] == did["sums"]["gradients"]
        assert sum(plan["peak"].values()) == pytest.approx(sum(did["peak"].values()), rel=0.03)


@pytest.mark.clock
@pytest.mark.parametrize(
    ("spec", "accumulation"),
    [("dp_shard=4", 1), ("pp=2,tp=2,pipeline_microbatches=4,activation_checkpointing=full", 2)],
)
def test_fp32_weights_under_autocast_are_those_of_a_script(spec, accumulation):
    """`precision="mixed"` beside Accelerator(mixed_precision="bf16"): states and traffic to the byte, 3 % in all.

    But for the number of targets over data ranks, which a script's mean over them wants: one integer.
    """
    real = run(measured_in_a_script, 4, spec, ROWS, LENGTH, accumulation, "bf16")
    for rank in (0, 3):
        plan, did = run_alone(planned, "llama", spec, rank, accumulation, precision="mixed"), real[rank]
        if spec == "dp_shard=4":
            assert did["traffic"]["dp_shard"].pop("all_reduce")[:2] == (1, 8)
        assert plan["traffic"] == did["traffic"]
        assert [plan["kept"][kind] for kind in STATES] == [did["kept"][kind] for kind in STATES]
        assert sum(plan["peak"].values()) == pytest.approx(sum(did["peak"].values()), rel=0.03)


@pytest.mark.parametrize(("spec", "bits"), [("pp=2,tp=2", 32), ("dp_shard=4", 4)])
def test_adapters_are_those_of_a_script(runs, spec, bits):
    """LoRA and QLoRA: only adapters have gradients and states; the base is gathered and never reduced."""
    real = run(measured_with_adapters, 4, spec, ROWS, LENGTH, runs.initial("llama"), bits)
    packed = {"pack": plan_four_bit()} if bits == 4 else {}
    for rank in (0, 3):
        plan, did = run_alone(planned, "llama", spec, rank, adapt=plan_lora(4), **packed), real[rank]
        assert plan["traffic"] == did["traffic"]
        assert [plan["kept"][kind] for kind in STATES] == [did["kept"][kind] for kind in STATES]
        assert plan["kept"]["gradients"] < plan["kept"]["parameters"] / 4
        assert sum(plan["peak"].values()) == pytest.approx(sum(did["peak"].values()), rel=0.03)


def test_number_of_collectives_is_what_another_counter_counts():
    """`sums` come from a loop and a counter that share nothing with the recorder."""
    counted = run(measured, 4, "llama", "tp=4", ROWS, LENGTH)[0]["sums"]
    plan = run_alone(planned, "llama", "tp=4", 0)["traffic"]["tp"]
    assert plan["all_gather"][0] == counted["number of gathers"]
    assert plan["reduce_scatter"][0] == counted["number of scatters"]
    assert plan["all_reduce"][0] == counted["number of reduces"]


def test_fullest_moment_is_what_the_allocator_reports():
    """The allocator also sees what kernels need while they run: little beside layers that are not tiny."""
    sizes = {"hidden_size": 256, "intermediate_size": 512}
    reported = run(allocated, 4, "llama", "dp_shard=4", 4, 128, **sizes)
    plan = run_alone(planned, "llama", "dp_shard=4", 0, sizes=sizes, seq=128)
    assert sum(plan["peak"].values()) == pytest.approx(reported[0], rel=0.03)


@pytest.mark.parametrize(
    "spec", ["dp_shard=4,activation_checkpointing=full", "pp=2,dp_shard=2,pipeline_microbatches=2"]
)
def test_more_layers_are_a_straight_line(spec):
    """Three and four layers tell what ten do."""
    sizes = {"num_hidden_layers": 10}
    few, all_ = (run_alone(planned, "llama", spec, 1, sizes=sizes, whole=whole) for whole in (False, True))
    assert few == all_


def test_more_micro_batches_are_a_straight_line():
    spec = "pp=2,dp_shard=2,pipeline_microbatches=12,pipeline_schedule=interleaved_1f1b"
    few, all_ = (run_alone(planned, "llama", spec, 1, rows=12, whole=whole) for whole in (False, True))
    assert few == all_


def rank_of_a_large_world():
    """Also the seconds of one core, so that other work on the machine does not count."""
    spec, begun = "tp=8,pp=4,dp_shard=32,pipeline_microbatches=4", time.process_time()
    ran = dry_run(LlamaConfig(**LLAMA_70B), spec, rank=1023, rows=4, seq=4096)
    assert ran.seconds > 0
    return time.process_time() - begun, ran.kept["parameters"], ran.place, ran.layers_run


def test_70b_on_1024_ranks_takes_seconds():
    seconds, parameters, place, layers_run = run_alone(rank_of_a_large_world)
    assert place == {"dp_replicate": 0, "pp": 3, "dp_shard": 31, "cp": 0, "tp": 7}
    assert layers_run == (3,)
    layer = (8192 * (8192 + 1024) * 2 + 3 * 8192 * 28672) // 8 + 2 * 8192
    whole = 19 * layer + 128256 // 8 * 8192 + 8192
    assert parameters == pytest.approx(2 * whole / 32, rel=1e-4)
    assert seconds < 60  # ten on two free cores


def refusal(call):
    try:
        call()
    except SpecError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"precision": "fp8"}, "precision=fp8"),
        ({"optimizer": "lion"}, "optimizer=lion"),
        ({"world_size": 3}, "dp_shard"),
        ({"model": models.mixtral_balanced(), "config": "pp=2", "rows": 2}, "output_router_logits=False works"),
        ({"model": models.mixtral(experts_implementation="eager")}, 'experts_implementation="grouped_mm" works'),
    ],
)
def test_refusals(options, words):
    given = {"model": models.llama(), "config": "dp_shard=2", **options}
    assert words in run_alone(refusal, lambda: dry_run(seq=8, **given))


def in_a_real_world():
    return refusal(lambda: dry_run(models.llama(), "dp_shard=2", seq=8))


def test_not_in_a_process_that_has_a_group():
    assert "process group" in run(in_a_real_world, 1)[0]


def test_process_is_as_before():
    """No group is left, and transformers knows fake tensors again."""

    def after():
        from torch._subclasses.fake_tensor import FakeTensorMode
        from transformers.utils.import_utils import is_fake_tensor

        dry_run(models.llama(), "dp_shard=2", seq=8)
        with FakeTensorMode():
            return torch.distributed.is_initialized(), is_fake_tensor(torch.empty(1))

    assert run_alone(after) == (False, True)


def test_a_hybrid_of_cp_is_named():
    """Rings and groups of Ulysses are parts of cp's ranks, and no groups of their own to who reads the traffic."""
    traffic = run_alone(planned, "llama", "cp=4,context_parallel=hybrid:2", 0)["traffic"]
    assert set(traffic) == {"cp", "dp_shard"}
    assert {"all_to_all", "send"} <= set(traffic["cp"])


def peak_activations(spec, world):
    """Bytes of a Llama with seven layers and 16,384 tokens of 64 features in fp32 on each rank."""
    config = models.CONFIGS["llama"](hidden_size=64, head_dim=16, num_hidden_layers=7)
    return dry_run(config, spec, world_size=world, rows=4, seq=4096 * world, precision="fp32").peak["activations"]


@pytest.mark.parametrize(("spec", "world", "tensors"), [("dp_shard=1", 1, 1), ("cp=2", 2, 2)])
def test_copies_on_the_host_are_no_memory_of_the_device(spec, world, tensors):
    """Of seven checkpointed layers the inputs leave it, and under cp what attention gave; two layers' are back."""
    whole, less = (
        run_alone(peak_activations, f"{spec},activation_checkpointing=full,activation_offload={on}", world)
        for on in ("false", "true")
    )
    assert whole - less >= 5 * tensors * 16384 * 64 * 4


def test_sums_of_accumulated_gradients_rest_on_the_host():
    """Under `offload=cpu` a step of three model calls holds no fp32 sums on the device that a step of one does not.

    But for a layer's, which is reduced there before it is added.
    """
    spec, sizes = "dp_shard=2,zero_stage=3,offload=cpu", {"num_hidden_layers": 7}
    one, three = (
        run_alone(planned, "llama", spec, 0, calls, world_size=2, precision="bf16", sizes=sizes) for calls in (1, 3)
    )
    sums = 4 * models.build("llama", **sizes).num_parameters() / 2
    assert sum(three["peak"].values()) - sum(one["peak"].values()) < sums / 7


@pytest.mark.parametrize("every", [2, 3])
def test_layers_of_which_each_nth_is_recomputed_stand_for_the_rest(every):
    """The fourth layer is no stand-in for the others: memory was 6 % too high of two, and too low of three."""
    spec = f"dp_shard=4,activation_checkpointing=every:{every}"

    def extrapolate(whole):
        return planned("llama", spec, 0, sizes={"num_hidden_layers": 11}, whole=whole)

    assert run_alone(extrapolate, False) == run_alone(extrapolate, True)


def test_unlike_widths_keep_no_scores():
    """Latent attention (keys of 192, values of 128 numbers) keeps what a GPU's kernel keeps, and no scores."""

    def attend():
        kept: list[torch.Tensor] = []
        with (
            fake_tensors_pass_as_real(),
            Shapes(allow_non_fake_inputs=True),
            torch.autograd.graph.saved_tensors_hooks(
                lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
            ),
        ):
            query, key, value = (torch.zeros(2, 4, 512, width, requires_grad=True) for width in (192, 192, 128))
            out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            known = {query.shape, value.shape}
            log_sums = [tensor.numel() for tensor in kept if tensor.numel() > 1 and tensor.shape not in known]
            out.sum().backward()
        assert out.shape == value.grad.shape == (2, 4, 512, 128)
        assert log_sums == [2 * 4 * 512]
        assert known <= {tensor.shape for tensor in kept}

    run_alone(attend)  # a backward in this process would keep later tests from forking


def test_memory_of_latent_attention_grows_with_its_tokens():
    """Four times the tokens of a row keep at most four times as much; scores are 16 times as many."""
    config = models.deepseek_v3(qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, num_hidden_layers=3)

    def measure(seq):
        return dry_run(config, "dp_shard=2", rows=1, seq=seq).peak["activations"]

    short, long = (run_alone(measure, seq) for seq in (512, 2048))
    assert long / short < 4
