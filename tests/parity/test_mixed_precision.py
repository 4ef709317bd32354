"""fp32 weights under mixed precision: what is gathered, what is held, and the numbers of torch's own FSDP2."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_parallel.axes.data.gradients import run_before_the_last
from hf_parallel.axes.data.units import get_groups_of
from tests import models
from tests.counting import CountCollectives
from tests.distributed import run, run_alone_once
from tests.rows import Rows
from tests.training import BF16, FP16, SUMS, TRAIN_SEED, activate, axes, none, number_differences, trainer_of

ROWS, LENGTH = 12, 33


def tokens(seed=5):
    return torch.randint(0, 515, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))


def build():
    return models.build("llama", num_hidden_layers=7, vocab_size=515)


def by_hand():
    """Losses under torch's FSDP2 and its policy, in the autocast that accelerate puts around the forward."""
    model, policy = build(), MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    share = tokens().chunk(2)[torch.distributed.get_rank()]
    for _ in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=share, labels=share).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def with_accelerate(spec):
    """The same in an unchanged loop; bytes gathered per parameter and micro-batch; 16-bit bytes held after a step."""
    activate(spec)
    from accelerate import Accelerator

    accelerator, model, losses = Accelerator(mixed_precision="bf16", cpu=True), build(), []
    size = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    share = tokens().chunk(2)[torch.distributed.get_rank()]
    for _ in range(3):
        with CountCollectives() as counted:
            output = model(input_ids=share, labels=share)
            accelerator.backward(output.loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(output.loss.item())
    assert output.logits.dtype == torch.float32
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    model.eval()
    with torch.inference_mode():
        evaluated = model(input_ids=share)
    drawn = accelerator.unwrap_model(model).generate(share[:, :5], max_new_tokens=3, do_sample=False)
    assert evaluated.logits.dtype == torch.float32
    assert drawn.shape == (ROWS // 2, 8)
    units = (module for module in model.modules() if isinstance(module, FSDPModule))
    held = [p for unit in units for group in get_groups_of(unit) for p in group.fsdp_params]
    assert sum(buffer.untyped_storage().nbytes() for p in held for buffer in p.all_gather_outputs) == 0
    return losses, {kind: count / size for kind, count in counted.whole.items()}


def test_data_ranks_gather_16_bits_with_the_numbers_of_fsdp2():
    """As many bits in every sum: the same numbers, whatever units the weights are gathered in."""
    for (ours, moved), theirs in zip(run(with_accelerate, 2, "dp_shard=2", init=False), run(by_hand, 2), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)
        assert 3 < moved["gather"] <= 4.05  # 2 bytes twice, of embedding and head once; autocast alone: 8
        assert moved["scatter"] == pytest.approx(4, rel=0.02)


class ProductsOfExperts(TorchDispatchMode):
    """The dtypes of all grouped products."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if "grouped_mm" in func._opname:
            self.dtypes.add(result.dtype)
        return result


def with_experts(spec):
    """Losses of a mixture in an unchanged loop, and the dtypes in which its experts compute."""
    activate(spec)
    from accelerate import Accelerator

    model, losses = models.build("qwen3_moe", vocab_size=515), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = Accelerator(mixed_precision="bf16", cpu=True).prepare(model, optimizer)
    share = tokens().chunk(2)[torch.distributed.get_rank()]
    for _ in range(3):
        with ProductsOfExperts() as seen:
            loss = model(input_ids=share, labels=share).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    return losses, seen.dtypes


def test_experts_compute_in_16_bits_whoever_holds_them():
    """FSDP2 does not gather the experts that one rank alone holds."""
    ours, theirs = (run(with_experts, 2, spec, init=False)[0] for spec in ("dp_shard=2,ep=2", "dp_shard=2"))
    assert ours[1] == theirs[1] == {torch.bfloat16}
    assert ours[0] == pytest.approx(theirs[0], rel=1e-3)  # steps in 16 bits


class Casts(TorchDispatchMode):
    """How many weights of `sizes` numbers are cast to bf16."""

    def __init__(self, sizes):
        super().__init__()
        self.sizes, self.count = sizes, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if func._opname == "_to_copy" and result.dtype == torch.bfloat16 and args[0].dtype == torch.float32:
            self.count += tuple(result.shape) in self.sizes
        return result


def accumulating(model):
    """As Accelerate's `no_sync`."""
    state = model._hf_parallel
    return run_before_the_last(state.root, state.config)


def cast(spec, alone=False, calls=1):
    """Losses of three steps of two micro-batches each, and how many matrices of the MLPs were cast in each step."""
    import hf_parallel

    model = models.build("llama", intermediate_size=96, vocab_size=515)
    if not alone:
        hf_parallel.parallelize(model, spec)
    down = model.model.layers[
        0 if alone or "pp" not in spec else 2 * model._hf_parallel.mesh.index("pp")
    ].mlp.down_proj
    part = down.weight.to_local() if isinstance(down.weight, DTensor) else down.weight
    sizes = {tuple(part.shape), tuple(part.t().shape)}
    optimizer, losses, counts, rows = torch.optim.SGD(model.parameters(), lr=0.1), [], [], tokens()
    for _ in range(3):
        with Casts(sizes) as casts:
            for first in (True, False):
                with accumulating(model) if first and not alone else contextlib.nullcontext():
                    with torch.autocast("cpu", dtype=torch.bfloat16):
                        loss = sum(model(input_ids=rows, labels=rows).loss for _ in range(calls)) / calls
                    (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        counts.append(casts.count)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        model.eval()(input_ids=rows, labels=rows)
    return losses, counts


@pytest.mark.parametrize(
    "spec",
    ["tp=2", "pp=2", "tp=2,activation_checkpointing=full", "pp=2,pipeline_schedule=zbv_zero_bubble"],
)
def test_without_data_ranks_a_matrix_is_cast_once_per_step(spec):
    """3 matrices in each MLP; the micro-batches of a pipeline, both calls and recomputation read the same copies."""
    layers = 4 if "pp" not in spec else 2
    expected = run(cast, 1, spec, True)[0][0]
    assert expected[2] < expected[0] - 0.1
    for losses, counts in run(cast, 2, spec):
        assert losses == pytest.approx(expected, rel=2e-3)  # bf16 keeps 8 bits: 4e-3 per product
        assert counts == [3 * layers] * 3


def test_two_calls_in_a_micro_batch_share_a_cast():
    """As of losses over pairs: what the backward pass of the former micro-batch went through is good for both."""
    for _, counts in run(cast, 2, "tp=2", False, 2):
        assert counts == [3 * 4] * 3


def tied(spec):
    """Where embedding and head are after a step."""
    import hf_parallel

    found = {}
    for name in ("llama", "qwen3"):
        model = models.build(name, vocab_size=515)
        hf_parallel.parallelize(model, spec)
        rows = tokens()[:4]
        seen = []
        model.model.layers[1].register_forward_hook(
            lambda *_, model=model, seen=seen: seen.extend(
                type(end.weight).__name__ for end in (model.get_input_embeddings(), model.get_output_embeddings())
            )
        )
        model(input_ids=rows, labels=rows).loss.backward()
        found[name] = seen
    return found


def test_embedding_and_head_are_gathered_only_while_they_are_needed():
    """In the middle of the layers: both are shards, but for a tied one, which both ends need."""
    for found in run(tied, 2, "dp_shard=2"):
        assert found == {"llama": ["DTensor", "DTensor"], "qwen3": ["Parameter", "Parameter"]}


def started(spec):
    """Is a model built in code ever moved as a whole?"""
    import hf_parallel

    model = build()
    torch.nn.Module.to = lambda self, *_: pytest.fail("moved as a whole")
    hf_parallel.parallelize(model, spec)


def test_sharded_models_are_moved_layer_by_layer():
    run(started, 2, "dp_shard=2")


def test_checksums_see_every_bit():
    from hf_parallel.axes.data.parameters import compute_checksum

    cpu, values = torch.device("cpu"), torch.randn(300_001)
    changed, exchanged = values.clone(), values.clone()
    changed[-1] = torch.nextafter(values[-1], torch.tensor(9.0))
    exchanged[[5, 200_000]] = values[[200_000, 5]]
    kinds = [values, changed, exchanged, values.bfloat16(), values[1:], values > 0, values.new_full((3, 5), torch.nan)]
    sums = [
        compute_checksum(kind, cpu).item() for kind in (*kinds, torch.tensor(3), torch.arange(5, dtype=torch.uint8))
    ]
    assert len(set(sums)) == len(sums)
    assert sums == [
        compute_checksum(kind, cpu).item() for kind in (*kinds, torch.tensor(3), torch.arange(5, dtype=torch.uint8))
    ]


def crossing(spec):
    """In which dtypes numbers cross between stages, in a step under autocast of a model in fp32."""
    import hf_parallel

    model, seen = models.build("llama"), set()
    hf_parallel.parallelize(model, spec)
    together, rows = dist.batch_isend_irecv, tokens()[:4]

    def noted(operations):
        seen.update(op.tensor.dtype for op in operations if op.tensor.is_floating_point() and op.tensor.ndim == 3)
        return together(operations)

    with mock.patch.object(dist, "batch_isend_irecv", noted), torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(input_ids=rows, labels=rows).loss
    loss.backward()
    return seen


@pytest.mark.parametrize(("spec", "dtype"), [("pp=2,dp_shard=2", torch.bfloat16), ("pp=2", torch.float32)])
def test_what_crosses_stages(spec, dtype):
    """16 bits where FSDP2 casts what enters a layer; else the residual stream is in fp32, and other numbers in 16."""
    assert run(crossing, 4 if "dp_shard" in spec else 2, spec) == [{dtype}] * (4 if "dp_shard" in spec else 2)


def evaluate_cast(spec, out, setting):
    """Train in fp32 with an evaluation in the midst, evaluate in 16 bits, and train the model that is left."""
    ranks, rows = activate(spec), Rows(22, TRAIN_SEED, length=33)
    settings = {setting: True, "eval_strategy": "epoch"}
    trainer, recorder = trainer_of(
        build(), out, ranks, settings, train_dataset=rows, eval_dataset=Rows(13, 5, length=33)
    )
    trainer.train()
    in_training = next(log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log)
    exact = [number for log in recorder.logs for number in log.values()] + [in_training]
    recorder.logs.clear()
    rounded = [trainer.evaluate()["eval_loss"], trainer.predict(rows).metrics["test_loss"]]
    dtypes = {parameter.dtype for parameter in trainer.model.parameters()}
    trainer.train()
    rounded += [number for log in recorder.logs for number in log.values()]
    return exact, rounded, dtypes


@pytest.mark.parametrize(
    ("spec", "setting"),
    [("dp_shard=2", "bf16_full_eval"), ("tp=2", "bf16_full_eval"), ("pp=2,dp_shard=2", "fp16_full_eval")],
)
def test_an_evaluation_in_16_bits_casts_the_model_as_in_one_process(tmp_path, spec, setting):
    """Trainer casts outside of training alone, and what it casts stays so: the next training is in 16 bits."""
    exact, rounded, dtypes = run_alone_once(evaluate_cast, None, str(tmp_path / "one"), setting)
    assert dtypes == {torch.bfloat16 if setting.startswith("bf16") else torch.float16}
    for ours in run(evaluate_cast, axes(spec)["world"], spec, str(tmp_path / "out"), setting, init=False):
        assert ours[2] == dtypes
        none(number_differences(ours[0], exact, SUMS))
        none(number_differences(ours[1][:2], rounded[:2], FP16 / 10))  # weights of 8 bits, products summed in fp32
        none(number_differences(ours[1], rounded, BF16.loss))


def cast_between_steps(spec):
    """Losses and norms of a model that is cast there and back."""
    activate(spec)
    from accelerate import Accelerator

    accelerator, found = Accelerator(cpu=True), []
    model = accelerator.prepare(build())
    for dtype in (torch.float32, torch.bfloat16, torch.float32, torch.float64):
        model.to(dtype)
        loss = model(input_ids=tokens(), labels=tokens()).loss
        loss.backward()
        found += [loss.item(), model.lm_head.weight.grad.norm().item()]
        model.zero_grad()
    with accelerator.no_sync(model):
        model(input_ids=tokens(), labels=tokens()).loss.backward()
    if spec is not None and "zero_stage=1" in spec:  # each rank has whole gradients of its own rows
        with pytest.raises(NotImplementedError, match="sums gradients; cast it after the step"):
            model.half()
    else:
        model.half()
        found.append(model.lm_head.weight.grad.float().norm().item())
    return found


@pytest.mark.parametrize("spec", ["dp_shard=2", "dp_shard=2,zero_stage=1"])
def test_a_sharded_model_is_cast_between_steps(spec):
    """What FSDP2 keeps of the former dtype goes; gradients that are not reduced yet do not."""
    reference = run_alone_once(cast_between_steps, None)
    for ours in run(cast_between_steps, 2, spec, init=False):
        theirs = reference[: len(ours)]
        none(number_differences(ours[:2], theirs[:2], SUMS))
        none(number_differences(ours, theirs, BF16.loss))


def lower_the_second(spec):
    """The gradient norm of two micro-batches, of which the second one alone is computed in autocast."""
    activate(spec)
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(build())
    with accelerator.no_sync(model):
        model(input_ids=tokens(), labels=tokens()).loss.backward()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=tokens(), labels=tokens()).loss
    loss.backward()
    return [float(accelerator.clip_grad_norm_(model.parameters(), float("inf")))]


def test_autocast_that_begins_between_micro_batches_keeps_their_gradients():
    """Where ranks reduce once per step; a lost micro-batch halves the norm."""
    for ours in run(lower_the_second, 2, "dp_shard=2,gradient_reduction=step", init=False):
        none(number_differences(ours, run_alone_once(lower_the_second, None), FP16))
