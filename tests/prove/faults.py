"""Errors of a layout, each by a small change in its processes: what `hf-parallel prove` must find, and where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from accelerate import accelerator
from torch.utils.data import RandomSampler
from transformers import Trainer, TrainerCallback, trainer


@dataclass(frozen=True)
class Fault:
    """An error of some ranks.

    Attributes:
        where: the module that the proof must name; empty where no module is at fault.
        kinds: kinds of numbers of which one must differ, where no module is at fault.
        batch: of the two of a step, that the proof must name; 0 where no batch is at fault.
    """

    name: str
    spec: str
    plant: Callable[[int], None]
    where: str = ""
    kinds: tuple[str, ...] = ()
    batch: int = 0


def in_model(change: Callable[[Any, int], None], ranks: tuple[int, ...] = (1,)) -> Callable[[int], None]:
    """Change the model of some ranks when training begins."""

    def plant(rank: int) -> None:
        class Planted(TrainerCallback):
            def on_train_begin(self, args, state, control, model=None, **kwargs):
                if rank in ranks:
                    change(model, rank)

        trainer.DEFAULT_CALLBACKS = [Planted, *trainer.DEFAULT_CALLBACKS]

    return plant


def output(module: str, change: Callable[[torch.Tensor], torch.Tensor], ranks=(1,)) -> Callable[[int], None]:
    """Change the output of a module while it trains."""

    def put(model, rank):
        def hook(_, args, out):
            if not torch.is_grad_enabled():
                return None
            return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)

        model.get_submodule(module).register_forward_hook(hook)

    return in_model(put, ranks)


class _ScaledBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, by):
        ctx.by = by
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.by, None


def of_second_batch(module: str, by: float, ranks=(1,)) -> Callable[[int], None]:
    """Scale the gradient of a module's output in the second of two gradient accumulation steps."""

    def put(model, rank):
        calls = iter(range(1 << 20))

        def hook(_, args, out):
            return _ScaledBackward.apply(out, by) if torch.is_grad_enabled() and next(calls) % 2 else None

        model.get_submodule(module).register_forward_hook(hook)

    return in_model(put, ranks)


def inputs(module: str, change: Callable[[dict], None], ranks=(1,)) -> Callable[[int], None]:
    """Change what a module is called with."""

    def put(model, rank):
        def hook(_, args, kwargs):
            kwargs = dict(kwargs)
            change(kwargs)
            return args, kwargs

        (model.get_submodule(module) if module else model).register_forward_pre_hook(hook, with_kwargs=True)

    return in_model(put, ranks)


def gradient(parameter: str, change: Callable[[torch.Tensor], None], ranks=(1,)) -> Callable[[int], None]:
    """Change this rank's part of a gradient before the optimizer reads it."""

    def plant(rank: int) -> None:
        class Planted(TrainerCallback):
            def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
                if rank in ranks:
                    found = model.get_parameter(parameter).grad
                    change(getattr(found, "_local_tensor", found))

        trainer.DEFAULT_CALLBACKS = [Planted, *trainer.DEFAULT_CALLBACKS]

    return plant


def method(owner: Any, name: str, make: Callable[[Callable], Callable], ranks=(0, 1, 2, 3)) -> Callable[[int], None]:
    """Replace a method of a class or module."""

    def plant(rank: int) -> None:
        if rank in ranks:
            setattr(owner, name, make(getattr(owner, name)))

    return plant


def scaled(by: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """A factor that a layout must not have."""
    return lambda tensor: tensor * by


def no_all_reduce(original: Callable) -> Callable:
    """Sums that a collective leaves out."""

    class Done:
        def wait(self):
            return True

    def left_out(tensor, *args, async_op=False, **kwargs):
        if tensor.is_floating_point() and tensor.numel() > 100:
            return Done() if async_op else None
        return original(tensor, *args, async_op=async_op, **kwargs)

    return left_out


def of_loss(factor: Callable[[Any, Any], float]) -> Callable[[Callable], Callable]:
    """A factor of the loss that training steps by."""

    def make(original):
        def compute_loss(self, model, inputs, *args, **kwargs):
            found = original(self, model, inputs, *args, **kwargs)
            by = factor(self, inputs) if torch.is_grad_enabled() else 1.0
            return (found[0] * by, *found[1:]) if isinstance(found, tuple) else found * by

        return compute_loss

    return make


def of_save(change: Callable[[str, torch.Tensor], torch.Tensor]) -> Callable[[int], None]:
    """Something else in the saved files than in the model."""
    from hf_parallel.checkpoint.saving import TensorFile

    def make(original):
        def put(self, name, tensor, *args, **kwargs):
            return original(self, name, change(name, tensor), *args, **kwargs)

        return put

    return method(TensorFile, "put", make)


def other_order(original: Callable) -> Callable:
    """Examples in the reverse order."""
    return lambda self: iter(list(original(self))[::-1])


def own_rows(original: Callable) -> Callable:
    """Of the data ranks only this one."""
    return lambda self, values, *args, **kwargs: values


def every_step(change: Callable[[Any, Any], None], ranks=(0, 1, 2, 3)) -> Callable[[int], None]:
    """Something before each step of the optimizer."""

    def plant(rank: int) -> None:
        class Planted(TrainerCallback):
            def on_pre_optimizer_step(self, args, state, control, model=None, optimizer=None, **kwargs):
                if rank in ranks:
                    change(model, optimizer)

        trainer.DEFAULT_CALLBACKS = [*trainer.DEFAULT_CALLBACKS, Planted]

    return plant


def swap_halves(tensor: torch.Tensor) -> torch.Tensor:
    """The slices of two ranks in the wrong order."""
    return torch.cat([*reversed(tensor.chunk(2))])


def data_of(change: Callable[[Any, int], Any]) -> Callable[[int], None]:
    """Other indices of examples on rank 1."""

    def make(original):
        def get(self, index):
            return original(self, change(self, index))

        return get

    def plant(rank: int) -> None:
        if rank == 1:
            from tests.rows import Rows

            Rows.__getitem__ = make(Rows.__getitem__)

    return plant


def _rates(model, optimizer):
    for group in optimizer.param_groups:
        group["lr"] *= 1.003


def _decay(model, optimizer):
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.1


def _stale(model, optimizer):
    kept = getattr(model, "_kept_weight", None)
    weight = model.get_parameter("model.layers.1.mlp.up_proj.weight")
    local = getattr(weight.data, "_local_tensor", weight.data)
    if kept is not None:
        local.copy_(kept)
    model._kept_weight = local.clone()


def _masked(kwargs):
    mask = kwargs.get("attention_mask")
    if mask is not None:
        kwargs["attention_mask"] = mask.clone()
        kwargs["attention_mask"][:, 0] = 0


def _all_labels(kwargs):
    labels = kwargs.get("labels")
    if labels is not None:
        kwargs["labels"] = torch.where(labels == -100, 1, labels)


def _later(kwargs):
    angles = kwargs.get("position_embeddings")
    if angles is not None:
        kwargs["position_embeddings"] = tuple(angle.roll(1, dims=1) for angle in angles)


AFTER_ATTENTION = "model.layers.1.post_attention_layernorm"  # a proof does not see in which order tokens come
LAYER, TP, DP, PP, CP = "model.layers.1", "tp=2", "dp_shard=2", "pp=2", "cp=2"
COPIES = "dp_replicate=2"
FAULTS = (
    # A module of one rank computes something else.
    *(
        Fault(f"{module} is off on rank 1 under {spec}", spec, output(module, scaled(1.001)), module)
        for spec, modules in {
            TP: ("model.embed_tokens", f"{LAYER}.self_attn", f"{LAYER}.mlp", f"{LAYER}.input_layernorm", "model.norm"),
            DP: ("model.embed_tokens", f"{LAYER}.self_attn.q_proj", f"{LAYER}.mlp.act_fn", LAYER, "lm_head"),
            CP: (f"{LAYER}.self_attn.o_proj", f"{LAYER}.post_attention_layernorm", "model.layers.2.mlp.down_proj"),
            PP: ("model.layers.2.self_attn", "model.layers.2.mlp.gate_proj"),
        }.items()
        for module in modules
    ),
    Fault("a residual is added twice", TP, output(f"{LAYER}.mlp", lambda out: 2 * out), f"{LAYER}.mlp"),
    Fault("a layer in 16 bits", DP, output(f"{LAYER}.mlp", lambda out: out.bfloat16().float()), f"{LAYER}.mlp"),
    Fault("noise per rank", COPIES, output(LAYER, lambda out: out + 1e-4 * torch.randn_like(out), (0, 1)), LAYER),
    Fault("tokens in another order", DP, output(f"{LAYER}.self_attn", lambda out: out.roll(1, 1)), AFTER_ATTENTION),
    Fault("examples in another order", DP, output(f"{LAYER}.mlp", lambda out: out.flip(0)), LAYER),
    Fault("positions shifted", CP, inputs(f"{LAYER}.self_attn", _later), f"{LAYER}.self_attn.o_proj"),
    Fault("the mask drops a token", DP, inputs("", _masked), "model.layers.0.self_attn.o_proj"),
    # Sums over ranks.
    Fault(
        "tp's all-reduce is left out",
        f"{TP},sequence_parallel=false",
        method(dist, "all_reduce", no_all_reduce),
        "model.embed_tokens",
    ),
    Fault("copies are not averaged", COPIES, method(dist, "all_reduce", no_all_reduce), "lm_head", ("gradient",)),
    # Losses.
    Fault("a factor of the world size", COPIES, method(Trainer, "compute_loss", of_loss(lambda *_: 2.0)), "lm_head"),
    Fault("half of the loss", DP, method(Trainer, "compute_loss", of_loss(lambda *_: 0.5)), "lm_head"),
    Fault(
        "a mean of means",
        DP,
        method(Trainer, "compute_loss", of_loss(lambda _, batch: 1 + 0.01 * (batch["labels"] == -100).sum().item())),
        "lm_head",
    ),
    Fault("ignored labels count", DP, inputs("", _all_labels), "lm_head"),
    # The backward pass.
    Fault("a gradient is doubled", TP, gradient("model.norm.weight", lambda g: g.mul_(2)), "model.norm"),
    Fault(
        "a gradient is dropped",
        DP,
        gradient(f"{LAYER}.mlp.up_proj.weight", lambda g: g.zero_()),
        f"{LAYER}.mlp.up_proj",
    ),
    Fault(
        "a slice of a gradient is another's",
        TP,
        gradient(f"{LAYER}.self_attn.v_proj.weight", lambda g: g.copy_(swap_halves(g))),
        kinds=("weight",),
    ),
    *(
        Fault(
            f"the backward pass of a batch is off under {spec}",
            spec,
            of_second_batch(f"{LAYER}.mlp", 1.01),
            f"{LAYER}.mlp.down_proj",
            batch=2,
        )
        for spec in (TP, DP)
    ),
    Fault("a gradient of a stage", PP, gradient("lm_head.weight", lambda g: g.mul_(1.001)), "lm_head"),
    # The optimizer.
    Fault("another learning rate", TP, every_step(_rates), "model.embed_tokens", ("weight",)),
    Fault("another weight decay", DP, every_step(_decay), "model.embed_tokens", ("weight",)),
    Fault("a stale weight", DP, every_step(_stale, (1,)), f"{LAYER}.mlp.up_proj"),
    # Data.
    Fault("an example twice", DP, data_of(lambda rows, i: i - i % 2), "model.embed_tokens"),
    Fault("other examples", COPIES, data_of(lambda rows, i: (i + 7) % len(rows)), "model.embed_tokens"),
    Fault("another order on rank 1", DP, method(RandomSampler, "__iter__", other_order, (1,)), "model.embed_tokens"),
    Fault(
        "an evaluation of own examples",
        DP,
        method(accelerator.Accelerator, "gather_for_metrics", own_rows),
        kinds=("metric",),
    ),
    # Saves.
    Fault(
        "a wrong slice is saved",
        TP,
        of_save(lambda name, tensor: swap_halves(tensor) if "up_proj" in name else tensor),
        kinds=("saved weight",),
    ),
    Fault(
        "a tensor is saved as zeros",
        DP,
        of_save(lambda name, tensor: tensor * 0 if name == "model.norm.weight" else tensor),
        kinds=("saved weight",),
    ),
)  # fmt: skip
