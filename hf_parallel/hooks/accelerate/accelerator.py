"""Accelerate: unchanged loops train parallel models by `prepare`, `accumulate`, `backward`, `clip_grad_norm_`."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import types
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.utils import ModelOutput

from hf_parallel.apply.own_files import make_whole
from hf_parallel.apply.parallelize import clip_together, parallelize_model
from hf_parallel.apply.weights import former_parameters, note_former_parameters
from hf_parallel.ask.keys.layers import check_compiled
from hf_parallel.ask.spec import refuse
from hf_parallel.axes.compile import compile_layers
from hf_parallel.axes.data import host_step
from hf_parallel.axes.data.gradients import run_before_the_last
from hf_parallel.axes.data.lowered import compute_in
from hf_parallel.axes.data.parameters import add_late_parameters
from hf_parallel.axes.pipeline.batches import count_causal_targets
from hf_parallel.axes.tensor.axis import TENSOR
from hf_parallel.checkpoint.codes import count_unlike_blocks
from hf_parallel.hooks import bitsandbytes, hangs, monitoring, report, runtime
from hf_parallel.hooks.accelerate import loop_losses
from hf_parallel.hooks.accelerate.paired_losses import PairedLoss
from hf_parallel.hooks.loss_scales import scale_together
from hf_parallel.hooks.module_hooks import tell_of_earlier_hooks
from hf_parallel.hooks.patching import patch, replacing
from hf_parallel.hooks.peft.before import make_parallel_below
from hf_parallel.hooks.trainer import bad_numbers, means
from hf_parallel.hooks.trainer.rows import without_targets
from hf_parallel.model.anatomy import list_transformer_blocks
from hf_parallel.model.calls import bind_by_name
from hf_parallel.model.families import MASKED_MEANS
from hf_parallel.ranks import desync
from hf_parallel.ranks.local import WholeWhenRead, whole_when_read

if TYPE_CHECKING:
    from accelerate import Accelerator, LocalSGD

    from hf_parallel.apply.parallelize import ParallelState


# ---- Which settings of Accelerate any layout keeps: another engine, fp8 of its own and hooks of DDP are refused


#: Arguments of Accelerator, the variable by which the launcher says the same, and what works.
_ENGINES = (
    (("fsdp_plugin",), "ACCELERATE_USE_FSDP", "dp_shard in the spec"),
    (("deepspeed_plugin", "deepspeed_plugins"), "ACCELERATE_USE_DEEPSPEED", "dp_shard and zero_stage in the spec"),
    (("megatron_lm_plugin",), "ACCELERATE_USE_MEGATRON_LM", "tp and pp in the spec"),
    (("parallelism_config", "torch_tp_plugin"), "ACCELERATE_USE_PARALLELISM_CONFIG", "the spec alone"),
)


@patch(
    "accelerate.accelerator:Accelerator.__init__", "an engine of its own; hooks of DDP and time-outs have no effect"
)
def init(original: Callable, self: Accelerator, *args: object, **kwargs: object) -> None:
    """Refuse engines that would do the layout's work a second time, and apply the script's time-out to all groups."""
    if runtime.current() is None:
        original(self, *args, **kwargs)
        return
    given = bind_by_name(original, (self, *args), kwargs)
    for names, variable, works in _ENGINES:
        named = [name for name in names if given.get(name) is not None]
        named += [variable] if os.environ.get(variable, "false").lower() == "true" else []
        if named:
            shown = f"{works} works; `hf-parallel migrate FILE` prints the spec for the launcher's configuration"
            refuse(f"{named[0]} of Accelerate", "a second layout beside --parallel", do=shown)
    original(self, *args, **kwargs)
    if self.mixed_precision == "fp8":
        refuse("mixed_precision=fp8", "Accelerate converts whole models", "precision=fp8 in the spec")
    hook = "no" if self.ddp_handler is None else self.ddp_handler.comm_hook.value
    if hook != "no" and runtime.mesh().config.data_parallel_size > 1:
        refuse(f"comm_hook={hook}", "there is no DDP to call it", "quantize_gradients=int8 in the spec")
    asked = self.init_handler.to_kwargs() if self.init_handler is not None else {}
    if "timeout" in asked:
        runtime.change_time_out(asked["timeout"])


@patch("accelerate.local_sgd:LocalSGD.__init__", "keeps weights of its own on each data rank")
def local_sgd(original: Callable, self: LocalSGD, *args: object, **kwargs: object) -> None:
    """Switch LocalSGD off for one data rank, as in one process. Refuse it for several: they share their weights."""
    given = bind_by_name(original, (self, *args), kwargs)
    if runtime.current() is not None:
        if given.get("enabled", True) and runtime.mesh().config.data_parallel_size > 1:
            refuse("LocalSGD", "data ranks share one set of weights", "LocalSGD(…, enabled=False)")
        given["enabled"] = False
    original(**given)


#: Libraries whose optimizers treat each parameter by itself. Others may need all parameters, and a stage has a part.
_BY_PARAMETER = {"torch", "torchao", "transformers", "bitsandbytes", "accelerate"}


@patch("accelerate.accelerator:Accelerator.prepare", "models made before become parallel")
def prepare(original: Callable, self: Accelerator, *args: object, **kwargs: object) -> object:
    """Make all models parallel before any optimizer is prepared."""
    if self.mixed_precision == "fp16" and runtime.mesh().device.type == "cpu":
        refuse("fp16", "accelerate scales losses on accelerators only, not on CPUs", "bf16")
    scale_together(self)
    for model in (arg for arg in args if isinstance(arg, nn.Module)):
        _prepare_for_loops(self, model)
    return original(self, *args, **kwargs)


def _prepare_for_loops(accelerator: Accelerator, model: nn.Module) -> None:
    mesh = runtime.mesh()
    make_parallel(model)
    normalise_over_data_ranks(model)
    if (state := runtime.find_parallel_state(model)) is not None:
        # Scripts ask DDP for `no_sync`, and in loops for `module`, where there are several processes.
        if not hasattr(model, "no_sync"):
            vars(model)["no_sync"] = types.MethodType(defer_reduction, model)
        if mesh.data_size > 1 and runtime.is_loop() and not hasattr(model, "module"):
            vars(model)["module"] = ModuleOfDDP(model)
        if accelerator.scaler is not None and state.pipeline is not None:
            # A schedule runs its backward passes before the script scales the loss.
            state.pipeline.services.scale_loss = accelerator.scaler.scale
    monitoring.watch_loop_model(model, str(accelerator.project_dir or hangs.OUTPUTS))
    model.register_forward_pre_hook(hangs.mark_forward_pass)


def make_optimizer_ready(optimizer: torch.optim.Optimizer) -> None:
    """Point an optimizer at the parallel model's parameters, and say where it differs from one process."""
    inner = getattr(optimizer, "optimizer", optimizer)
    size, kind = runtime.mesh().size("pp"), type(inner)
    if kind.__name__ == "LoraFAOptimizer":  # it multiplies the A of each adapter with itself
        refuse(kind.__name__, "needs whole adapters, of which ranks hold parts", "AdamW")
    bitsandbytes.check_eight_bit(optimizer)
    if size > 1 and kind.__module__.partition(".")[0] not in _BY_PARAMETER:
        report.say(
            f"{kind.__name__} has the parameters of one stage of pp_size={size}: a norm over all of them, or a "
            "choice among them, is the stage's; hf_parallel.clip_grad_norm(model, float(\"inf\")) is the model's "
            "(docs/idioms.md)"
        )
    follow_parameters(optimizer)
    if unlike := count_unlike_blocks(inner):
        report.say(
            f"{kind.__name__} keeps states of few bits in blocks, which begin anew in each rank's part of "
            f"{unlike} parameters: they round otherwise than in one process; adamw_torch does not round"
        )
    host_step.check_host_optimizer(inner)
    monitoring.follow_steps(inner)


def make_parallel(model: nn.Module) -> None:
    """Make a model parallel on the active mesh, and note by name which parameters the new ones replace.

    If the model is parallel already, shard the parameters that a script has put into it since, such as LLaVA's
    projector, with rank 0's values. Otherwise each data rank would train them on its own examples alone.
    """
    if (state := runtime.find_parallel_state(model)) is not None:
        if state.mesh.config.sharing_size > 1:
            with note_former_parameters(model):
                add_late_parameters(state.root, state.mesh)
        return
    make = functools.partial(parallelize_model, mesh=runtime.mesh())
    with note_former_parameters(model), tell_of_earlier_hooks(model):
        if hasattr(model, "peft_config"):
            make_parallel_below(model, make)
        else:
            make(model)
    loop_losses.watch_first_batch(model)
    runtime.equalise_within_model()


def follow_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Replace an optimizer's parameters by those of the parallel model; leave out those of other stages.

    States that it made before any step, such as Adagrad's sums, are made for the new ones.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    held: dict[nn.Module, dict[str, nn.Parameter]] = {}  # each model's parameters by name, listed once
    for group in inner.param_groups:
        kept = []
        for parameter in group["params"]:
            current = parameter
            if parameter in former_parameters:
                reference, name = former_parameters[parameter]
                model = reference()
                if model not in held:
                    held[model] = dict(model.named_parameters())
                current = held[model].get(name)
                _move_first_states(inner, parameter, current)
            if current is not None:
                kept.append(current)
        group["params"] = kept


def _move_first_states(optimizer: torch.optim.Optimizer, former: torch.Tensor, current: torch.Tensor | None) -> None:
    """Give a parameter's states to the one in its place, if no step has written to them: each tensor is one number."""
    slots = optimizer.state.pop(former, {})
    tensors = {name: value for name, value in slots.items() if torch.is_tensor(value) and value.ndim}
    made = {}
    for name, value in tensors.items():
        first = value.flatten()[:1]
        if value.shape != former.shape or bool((value != first).any()):
            refuse("prepare()", "the optimizer took steps before", do="prepare model and optimizer first")
        if current is not None:
            made[name] = torch.full_like(current.detach(), first.sum().item(), dtype=value.dtype)
    if current is not None and slots:
        optimizer.state[current] = {**slots, **made}


def normalise_over_data_ranks(model: nn.Module) -> None:
    """Let a model's loss be the mean over the targets of all data ranks, not the mean of their means.

    Causal models are given the number of targets of all ranks, as Trainer gives it; the means of other heads are
    weighted (`means`). In loops we do so only for losses with gradients, also in `model.eval()`, the mode in which
    `from_pretrained` leaves a model; without gradients a rank may call it alone, and gets the loss of its own real
    rows. In Trainer we always do, unless the script weights by the count itself.
    """
    state = runtime.find_parallel_state(model)
    for part in state.parts if state is not None else ():
        normalise_over_data_ranks(part)
    if state is None or state.mesh.data_size == 1 or state.counts_tokens:
        return
    state.counts_tokens = True
    pairs = PairedLoss(model)

    def enter(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        given = bind_by_name(module.forward, args, kwargs) if args else kwargs
        passed_on = given.get("num_items_in_batch") is not None
        # A walk over all parameters in `model.eval()`, so that it is made once for a call.
        trains = torch.is_grad_enabled() and (module.training or any(p.requires_grad for p in module.parameters()))
        scope = means.get_scope()
        # Trainer's evaluation has left repeated rows out; that of a loop drops what a rank without real rows finds.
        last = loop_losses.find_last_batch(given) if trains or scope is None else None
        if last is not None and not trains and not last.real:
            last = None
        if pairs.begin(given):
            forward = means.enter(None, passed_on, given)
            forward.whole = forward.counted = True
            forward.last, forward.trains = last, trains
            return None
        labels, masked = given.get("labels") if state.sums_over_tokens and not passed_on else None, False
        if last is not None and last.real is not None and torch.is_tensor(labels) and len(labels) == last.rows:
            given = {**given, **without_targets({"labels": labels}, last.real, last.rows)}
            args, kwargs, masked = (), given, True
        if scope is None:
            share = 1.0 if trains else None
        else:  # None: the means stay those of this rank's rows
            share = None if scope.weighs_itself and not passed_on else scope.share
        forward = means.enter(share, passed_on, given)
        forward.last, forward.leaves_repeats, forward.trains = last, masked, trains
        if passed_on:
            forward.counted = state.sums_over_tokens  # of others it is seen when they take a sum
        elif forward.share is not None and state.sums_over_tokens and given.get("labels") is not None:
            means.note(forward)
            if state.pipeline is None or state.pipeline.items is None:  # else the whole batch is counted already
                items = count_causal_targets(given) * (not runtime.is_absent())
                dist.all_reduce(items, group=state.mesh.data_group)
                items = items * ((forward.share or 1.0) / state.mesh.data_size)
                return args, {**kwargs, "num_items_in_batch": items}
        return (args, kwargs) if masked else None

    model.register_forward_pre_hook(enter, with_kwargs=True)
    # A closure, not a partial: a deep copy of the model shares its state.
    model.register_forward_hook(lambda module, _, output: _leave_forward(state, module, output), always_call=True)


def _leave_forward(state: ParallelState, module: nn.Module, output: object) -> None:
    """Correct a masked mean when a forward pass ends, and say what its loss is a mean over where that is not known."""
    forward = means.leave_forward()
    loss = output.get("loss") if isinstance(output, dict) else None
    hidden = forward.given.get(MASKED_MEANS.get(type(module).__name__, ""))
    if isinstance(output, dict) and loss is not None and forward.share is not None and torch.is_tensor(hidden):
        means.note(forward)
        output["loss"] = loss = means.correct_over_data_ranks(loss, hidden.sum().float(), forward.share)
    if forward.trains:
        loop_losses.note_forward(loss, forward.counted, forward.given)
    if state.pipeline is not None and not state.pipeline.last:
        return
    if forward.last is not None and not forward.leaves_repeats:
        _say_once(state, _REPEATED.format(forward.last.repeated))
    if loss is None or forward.share is None:
        return
    if not forward.counted:
        sums = loop_losses.is_undivided_sum(loss.grad_fn, set())
        _say_once(state, (_SUM if sums else _UNKNOWN).format(type(module).__name__, state.mesh.data_size))
    elif forward.filled and means.get_scope() is None:
        _say_once(state, _IN_LOOPS)


_REPEATED = (
    "a last batch is filled with repeated sequences, here {}, and the loss counts them, as under DDP: drop_last=True"
    " leaves that batch out; a model's own mean over the labels that it is given (labels=…) counts real ones alone"
)
_UNKNOWN = (
    "what the loss of {} is a mean over is not known: it is averaged over data ranks, "
    "which is that of one process where they have as many targets"
)
_SUM = (
    "the loss of {0} is a sum over the targets of a data rank, and {1} data ranks average gradients: they are 1/{1} "
    "of one process's, unless the script multiplies by {1}, as it does where it divides by the targets of all ranks"
)
_IN_LOOPS = (
    "the model's loss is the mean over the targets of all data ranks; a loop that weights by counts of its own "
    "passes num_items_in_batch to the model"
)


def _say_once(state: ParallelState, message: str) -> None:
    if state.note_line(message):
        report.say_here(state.mesh, message)


@patch("accelerate.accelerator:Accelerator.prepare_model", "would wrap in DDP")
def prepare_model(
    original: Callable,
    self: Accelerator,
    model: nn.Module,
    device_placement: bool | None = None,
    evaluation_mode: bool = False,
) -> object:
    """Apply autocast, and compile layers, not the whole model. The parallel model places and reduces by itself."""
    if not evaluation_mode and runtime.find_parallel_state(model) is None:  # the script calls it by itself
        _prepare_for_loops(self, model)
    state = runtime.find_parallel_state(model)
    if state is None:
        return original(self, model, device_placement=device_placement, evaluation_mode=evaluation_mode)
    scale_together(self)
    plugin, precision = self.state.dynamo_plugin, self.mixed_precision if self.native_amp else None
    if plugin.backend.value != "NO":
        check_compiled(state.config, "torch.compile")
        part = None if state.plan is None else state.plan.part(TENSOR)
        if part is not None and part.why_not_compiled is not None:
            refuse("torch.compile", *part.why_not_compiled)
        views = [] if state.pipeline is None else state.pipeline.views
        layers = [layer for view in views for layer in view.layers] or list_transformer_blocks(model)
        selective = state.config.recompute_way_on(state.mesh.rank) == "selective"
        compile_layers(layers, selective, **plugin.to_kwargs())
    with replacing(plugin, backend=type(plugin.backend)("NO")):
        prepared = original(self, model, device_placement=False, evaluation_mode=True)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision or "")
    casts = self.autocast_handler is None or self.autocast_handler.enabled
    if dtype is not None and casts:
        # Data ranks gather fp32 weights in 16 bits; accelerate's autocast, inside the forward, would come too late.
        for each in [part._hf_parallel for part in state.parts] or [state]:
            compute_in(each.root, dtype)
    return prepared


@patch("accelerate.utils.operations:convert_to_fp32", "copies split logits that nobody reads", copies=True)
def convert_to_fp32(original: Callable, tensor: object) -> object:
    """Cast outputs to fp32. Outputs in parts are cast when they are read, because the loss does not read them."""
    if not isinstance(tensor, ModelOutput):
        return original(tensor)
    parts = {key for key in dict.keys(tensor) if isinstance(tensor, WholeWhenRead) and not tensor.is_whole(key)}
    parts |= {key for key, value in dict.items(tensor) if isinstance(value, DTensor)}
    if not parts:
        return original(tensor)
    for key in list(dict.keys(tensor)):
        if key in parts:
            whole_when_read(tensor, key, torch.Tensor.float)
        else:
            tensor[key] = original(dict.__getitem__(tensor, key))
    return tensor


@patch("accelerate.accelerator:Accelerator.no_sync", "knows DDP's and its own FSDP2")
def no_sync(original: Callable, self: Accelerator, model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Run a micro-step that is not the last of its step."""
    return defer_reduction(model)


@contextlib.contextmanager
def defer_reduction(model: nn.Module) -> Iterator[None]:
    """Run all micro-batches of a step but the last one, and reduce gradients later where `zero_stage` allows it."""
    with contextlib.ExitStack() as stack:
        for each in runtime.list_parallel_states(model):
            stack.enter_context(run_before_the_last(each.root, each.config))
        yield


class ModuleOfDDP:
    """The model itself, as DDP's `module`. It has no `module`, so that a script's loop of unwrapping ends."""

    def __init__(self, model: nn.Module) -> None:
        object.__setattr__(self, "_model", model)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._model)

    def __getattr__(self, name: str) -> Any:
        if name == "module":
            raise AttributeError(name)
        return getattr(self._model, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._model, name, value)

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self._model(*args, **kwargs)

    def __deepcopy__(self, memo: dict) -> ModuleOfDDP:
        return ModuleOfDDP(copy.deepcopy(self._model, memo))

    def __reduce__(self) -> tuple:
        return ModuleOfDDP, (self._model,)


@patch("accelerate.accelerator:Accelerator.check_trigger", "asks data ranks, not those of one model")
def check_trigger(original: Callable, self: Accelerator) -> bool:
    """Return whether any rank has set the trigger, so that all ranks stop or none. Collective."""
    if self.flag_tensor is None:
        self.flag_tensor = torch.tensor(0, device=self.device)
    dist.all_reduce(self.flag_tensor, dist.ReduceOp.MAX)
    return original(self)


@patch("accelerate.accelerator:Accelerator.clip_grad_norm_", "norm of one stage or shard only")
def clip_grad_norm_(
    original: Callable,
    self: Accelerator,
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2,
) -> torch.Tensor:
    """Clip gradients by their norm over all stages and shards of the model; return the norm."""
    desync.come_to_call()
    parameters = parameters if isinstance(parameters, torch.Tensor) else list(parameters)
    states = [state for state in map(runtime.find_parallel_state, self._models) if state is not None]
    if not states:
        return original(self, parameters, max_norm, norm_type)
    self.unscale_gradients()
    monitoring.note_gradients()
    norm = clip_together(parameters, states, max_norm, norm_type)
    if (looking := bad_numbers.find_looking()) is not None:
        looking.norm = norm
    return norm


@patch("accelerate.accelerator:Accelerator.get_state_dict", "returns shards")
def get_state_dict(
    original: Callable, self: Accelerator, model: nn.Module, unwrap: bool = True
) -> dict[str, torch.Tensor]:
    """Return whole tensors on rank 0 and nothing on other ranks. Rank 0 may be alone while the others wait for it."""
    if runtime.find_parallel_state(model) is None:
        return original(self, model, unwrap)
    whole = make_whole("accelerator.get_state_dict", model.state_dict())[0]
    return cast(dict[str, torch.Tensor], whole) if runtime.mesh().rank == 0 else {}
