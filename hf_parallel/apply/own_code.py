"""Layers that a script has written or changed, tried on a copy of the model before the model is split.

tp and cp know what the layers of libraries compute. A script's own may do what no part of a layer or of a sequence
can: mix tokens between regions, take a mean over columns, attend with products of its own.

    copy of the model at hand, with weights drawn anew     outputs, loss, gradients      as they are
    the same copy, made parallel                           outputs, loss, gradients      must be equal
"""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrizations import _SpectralNorm

from hf_parallel.apply.weights import full_tensor
from hf_parallel.ask.config import ParallelConfig
from hf_parallel.ask.session import of_session
from hf_parallel.ask.spec import SpecError, get_first_line, refuse
from hf_parallel.axes.tensor.whole_layers import WholeColumn, WholeRow
from hf_parallel.model.anatomy import find_stacks, find_token_readers, list_numbers_of_draws
from hf_parallel.model.families import is_hook_of_script, is_written_by_script
from hf_parallel.plans.resolve import read_model, resolve
from hf_parallel.ranks.mesh import ParallelMesh
from hf_parallel.ranks.messages import gather_objects

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_parallel.axes.axis import Plan

#: Above so many parameters a copy has one layer of each kind.
LARGEST = 300_000_000
#: Of a tensor's norm. Sums in another order are off by 1e-5, another token or column by 1e-2 and more.
TOLERANCE = 1e-3
#: Of the largest gradient's norm: gradients that are zero but for rounding are as far off as they are large.
NOISE = 1e-6
ROWS, SEED = 3, 11
#: Axes that change what a forward computes from.
SPLITTING = ("tp", "cp", "ep")


class _Trial:
    """A note that a model is being tried now."""

    runs = False


def is_trying_own_code() -> bool:
    """Return whether the models that run now are copies, of which loops and losses need not be told."""
    return of_session(_Trial).runs


Apply = Callable[[nn.Module, "Plan", ParallelMesh], object]


@dataclass(frozen=True)
class Numbers:
    """The outputs, loss and gradients of a step of the copy, by name; or the error that it stops at."""

    outputs: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor | None]
    error: Exception | None = None


def prove_own_code(model: PreTrainedModel, mesh: ParallelMesh, apply: Apply) -> None:
    """Try a model with layers of the script's own in this layout. Collective over all ranks.

    Where a head takes more than tokens, the layers below it are tried: it reads whole outputs of theirs.

    Args:
        model: with weights or on the meta device; not changed.
        apply: makes a model parallel by a plan.

    Raises:
        SpecError: it trains with other numbers than in one process, or cannot be tried.
    """
    axes = [axis for axis in SPLITTING if mesh.size(axis) > 1]
    own = find_own_code(model) if axes or mesh.size("pp") > 1 else {}
    if not own:
        return None
    what = ", ".join(_name_each_class(own))
    with mesh.fork_random_state(), _trying(mesh.device):
        try:
            plain = _make_copy(model, mesh.device)
            batch, expected, changed = _run_alone(plain, mesh)
        except Exception as error:  # some modules hold what nothing copies
            plain, batch, expected, changed = model, {}, Numbers({}, {}, error), None
        base = getattr(model, "base_model", model)
        if expected.error is not None and (base is not model or not axes):
            return None if base is model else prove_own_code(base, mesh, apply)
        if expected.error is not None:
            why = f"{what} is no layer of a library, and cannot be tried ({get_first_line(expected.error)})"
            refuse(_say_sizes(mesh, axes), why, _say_ones(axes), cause=expected.error)
        if changed is not None and mesh.size("pp") > 1:
            why = f"{what} changes {changed} whenever it runs, which is once per micro-batch"
            refuse(_say_sizes(mesh, ["pp"]), why, "pp_size=1")

        def find_difference_in(axes: Iterable[str], **settings: Any) -> str | None:
            layout = _choose_layout(mesh, axes, settings)
            return _compare(_copy_module(plain), batch, expected, layout, apply)

        found = find_difference_in(axes) if axes else None
        if found is None:
            return None
        cuts_tokens = "tp" in axes and mesh.config.sequence_parallel is not False
        if cuts_tokens and find_difference_in(axes, sequence_parallel=False) is None:
            why = f"{what} computes other numbers from a part of the tokens: {found}"
            refuse(_say_sizes(mesh, ["tp"]), why, "sequence_parallel=false")
        guilty = [axis for axis in axes if len(axes) > 1 and find_difference_in([axis]) is not None] or axes
    refuse(_say_sizes(mesh, guilty), f"{what} computes other numbers where it is split: {found}", _say_ones(guilty))


def refuse_changed_code(model: PreTrainedModel, mesh: ParallelMesh) -> None:
    """Let the model's first forward pass refuse layers that a script has written since: they were not tried.

    Raises:
        SpecError: in that pass.
    """
    axes = [axis for axis in ("tp", "cp") if mesh.size(axis) > 1]
    if not axes:
        return
    before = set(find_own_code(model))

    def look(module: nn.Module, args: tuple) -> None:
        handle.remove()
        readers = {id(inner) for reader in find_token_readers(model) for inner in reader.modules()}
        around = [layer for layer in model.modules() if isinstance(layer, WholeColumn | WholeRow)]
        readers -= {id(inner) for layer in around for inner in layer.modules()}  # what is inside sees all
        late = {name: own for name, own in find_own_code(model).items() if name not in before}
        for name, own in late.items():
            if id(model.get_submodule(name)) in readers:
                why = f"{own} ({name}) has come into the model after it was split, and cannot be tried"
                refuse(_say_sizes(mesh, axes), why, do=f"change it before the model is made, or {_say_ones(axes)}")

    handle = model.register_forward_pre_hook(look)  # after `watch_for_late_modules`


def refuse_unlike_statistics(model: nn.Module, mesh: ParallelMesh) -> None:
    """Let the first training pass refuse layers of a script that keep statistics of a data rank's own rows.

    Raises:
        SpecError: in that pass; ranks hold other values of a buffer that the pass has changed.
    """
    own = find_own_code(model) if mesh.data_size > 1 else {}
    named = {f"{name}.{key}": (name, key) for name in own for key in model.get_submodule(name)._buffers}
    if not named:
        return

    def read_states() -> dict[str, tuple[int, int]]:
        held = ((full, model.get_submodule(name)._buffers[key]) for full, (name, key) in named.items())
        return {full: (id(buffer), buffer._version) for full, buffer in held if buffer is not None}

    before: dict[str, tuple[int, int]] = {}

    def begin(module: nn.Module, args: tuple) -> None:
        before.update(read_states())

    def end(module: nn.Module, args: tuple, output: object) -> None:
        if not module.training or not torch.is_grad_enabled():
            return
        for handle in handles:
            handle.remove()
        changed = [full for full, state in read_states().items() if before.get(full) != state]
        sums = {full: float(model.get_buffer(full).double().sum()) for full in changed}
        unlike = [full for full in sums if len({held.get(full) for held in gather_objects(sums, group)}) > 1]
        if unlike:
            why = f"{own[named[unlike[0]][0]]} keeps {unlike[0]} of its own rows on each data rank"
            refuse(f"{mesh.data_size} data ranks", why, do="reduce it over them in the forward, or train with one")

    group = mesh.data_group_on_host()
    handles = (model.register_forward_pre_hook(begin), model.register_forward_hook(end))


def find_own_code(model: nn.Module) -> dict[str, str]:
    """Return the modules whose forward no library has written: their full names, and their classes."""
    written = {cls for cls in {type(module) for module in model.modules()} if is_written_by_script(cls)}
    found = {}  # with torch's modules that keep statistics of what they see
    for name, module in model.named_modules():
        # torch's prune, weight_norm and spectral_norm make a weight from others before each forward.
        hooks = {type(hook) for hook in module._forward_pre_hooks.values()}
        computed = [hook.__name__ for hook in hooks if hook.__module__.startswith("torch.nn.utils.")]
        if type(module) in written or computed or isinstance(module, (_BatchNorm, _SpectralNorm)):
            found[name] = " with ".join([type(module).__name__, *computed])
    return found


def _name_each_class(own: dict[str, str]) -> list[str]:
    first = {owner: name for name, owner in reversed(own.items())}
    return [f"{owner} ({name})" if name else owner for owner, name in reversed(first.items())]


# ---- The copy, and a batch that it takes ----------------------------------------------------------------------------


def _make_copy(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Return the model with drawn weights in fp32: what starts at zero, as adapters do, would hide what it computes.

    A large model's copy has one layer of each kind. Hooks of the script are not called on copies.
    """
    memo: dict[int, Any] = {}
    is_large = sum(parameter.numel() for parameter in model.parameters()) > LARGEST
    for stack in find_stacks(model) if is_large else ():
        kinds = {tuple(type(module) for module in layer.modules()): layer for layer in reversed(stack.layers)}
        memo[id(stack.layers)] = nn.ModuleList(_copy_module(layer, memo) for layer in reversed(kinds.values()))
    short = _copy_module(model, memo)
    for stack in find_stacks(short) if is_large else ():
        short.config.get_text_config().num_hidden_layers = len(stack.layers)
    for module in short.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks):
            for number in [n for n, hook in hooks.items() if is_hook_of_script(hook)]:
                hooks.pop(number)
    if next(short.parameters()).is_meta:
        short.to_empty(device=device)
        for tensor in (*short.parameters(), *short.buffers()):
            tensor.data.zero_()
        with contextlib.suppress(Exception):  # it fills tables, such as frequencies; of zeros they are equal, too
            short.init_weights()
    short.to(device).float().train()
    for module in short.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        vars(module).update(dict.fromkeys(list_numbers_of_draws(module), 0.0))
    torch.manual_seed(SEED)
    with torch.no_grad():
        for parameter in short.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return short


def _copy_module(module: Any, memo: dict[int, Any] | None = None) -> Any:
    """Copy a module with all its tensors: torch refuses those that were computed, such as weights that are pruned."""
    memo = {} if memo is None else memo
    copied = {inner for one in module.modules() if id(one) in memo for inner in one.modules()}
    for one in (one for one in module.modules() if one not in copied):
        for held in (*vars(one).values(), *one._parameters.values(), *one._buffers.values()):
            if torch.is_tensor(held) and id(held) not in memo:
                own = held.detach().clone()
                memo[id(held)] = nn.Parameter(own, held.requires_grad) if isinstance(held, nn.Parameter) else own
    return copy.deepcopy(module, memo)


def _run_alone(model: PreTrainedModel, mesh: ParallelMesh) -> tuple[dict[str, torch.Tensor], Numbers, str | None]:
    """Train copies on the first kind of batch that they take: the batch, the numbers, and a buffer that has changed.

    A model that draws random numbers in training, by whatever name, is put into evaluation.
    """
    text = model.config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    length = 8 * mesh.size("tp") * mesh.size("cp") + 5
    length = min(length, longest) if isinstance(longest, int) else length
    tokens = torch.randint(3, max(4, text.vocab_size - 3), (ROWS, length)).to(mesh.device)
    every = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    batches = ({**every, "labels": tokens}, {**every, "labels": tokens[:, 0] % 2}, every, {"input_ids": tokens})
    batch, numbers, run = batches[0], Numbers({}, {}), model
    for batch in batches:
        run = _copy_module(model)
        numbers = _train_on(run, batch)
        if numbers.error is None:
            break
    held = dict(model.named_buffers())
    changed = (name for name, buffer in run.named_buffers() if name not in held or not torch.equal(buffer, held[name]))
    if numbers.error is None and _find_difference(_train_on(_copy_module(model), batch), numbers) is not None:
        model.eval()
        numbers = _train_on(_copy_module(model), batch)
    return batch, numbers, next(changed, None)


def _train_on(model: nn.Module, batch: dict[str, torch.Tensor]) -> Numbers:
    """Run the forward and backward pass of one batch. Collective over the ranks of a parallel model."""
    try:
        given: Any = model(**batch)
        if not isinstance(given, Mapping):
            given = {str(place): one for place, one in enumerate([given] if torch.is_tensor(given) else given)}
        outputs = {key: value for key, value in given.items() if torch.is_tensor(value) and value.is_floating_point()}
        first = next(iter(outputs.values()))
        loss = outputs.get("loss", first)
        if loss.dim() > 0:
            weights = torch.randn(first.shape, generator=torch.Generator().manual_seed(SEED), device="cpu")
            loss = (first * weights.to(first.device)).mean()
        loss.backward()
        gradients = {
            name: None if parameter.grad is None else full_tensor(parameter.grad).clone()
            for name, parameter in model.named_parameters()
        }
    except Exception as error:
        return Numbers({}, {}, error)
    finally:
        model.zero_grad()
    return Numbers({key: full_tensor(value.detach()) for key, value in outputs.items()}, gradients)


@contextlib.contextmanager
def _trying(device: torch.device) -> Iterator[None]:
    """Compute in fp32 on a real device, whatever the caller's loading has set."""
    trial = of_session(_Trial)
    former, precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    torch.set_default_dtype(torch.float32)
    torch.set_float32_matmul_precision("highest")
    trial.runs = True
    try:
        default = torch.get_default_device()
        # A model is loaded on the meta device, where layers of a script would make their masks, too.
        place = torch.device("cpu") if default.type == "meta" else contextlib.nullcontext()
        with place, torch.enable_grad(), torch.autocast(device.type, enabled=False):
            yield
    finally:
        trial.runs = False
        torch.set_default_dtype(former)
        torch.set_float32_matmul_precision(precision)
        gc.collect()  # modules and their hooks name each other: copies would stay in memory for a while


# ---- The layouts that are tried -------------------------------------------------------------------------------------


def _choose_layout(mesh: ParallelMesh, axes: Iterable[str], settings: dict[str, Any]) -> ParallelMesh:
    """Return a mesh with these axes of the layout, in which stages hold the whole copy, as replicas do."""
    sizes = {f"{axis}_size": mesh.size(axis) if axis in axes else 1 for axis in (*SPLITTING, "dp_shard")}
    if "ep" in axes:
        sizes["dp_shard_size"] = mesh.size("dp_shard")
    others = mesh.config.world_size // (sizes["dp_shard_size"] * sizes["tp_size"] * sizes["cp_size"])
    of_axes = {"tp": ("sequence_parallel", "tp_mesh"), "cp": ("context_parallel",)}
    kept = {key: getattr(mesh.config, key) for axis in axes for key in of_axes.get(axis, ())}
    config = ParallelConfig(**{**sizes, "dp_replicate_size": others, **kept, **settings})
    return ParallelMesh.create(config, mesh.device, mesh.groups)


def _compare(
    model: PreTrainedModel, batch: dict[str, torch.Tensor], expected: Numbers, mesh: ParallelMesh, apply: Apply
) -> str | None:
    """Return how the copy's numbers differ once it is parallel, or None. Alike on all ranks."""
    try:
        plan = resolve(mesh.config, read_model(model, mesh.config))
    except SpecError as error:
        return str(error)
    apply(model, plan, mesh)
    numbers = _train_on(model, batch)
    return next((said for said in gather_objects(_find_difference(numbers, expected)) if said is not None), None)


def _find_difference(numbers: Numbers, expected: Numbers) -> str | None:
    if numbers.error is not None:
        return f"it stops with {type(numbers.error).__name__} ({get_first_line(numbers.error)})"
    for name, one in expected.outputs.items():
        other = numbers.outputs.get(name)
        if other is None or other.shape != one.shape:
            return f"{name} of another shape"
        if (off := float((other - one).norm() / one.norm())) > TOLERANCE:
            return f"{name} off by {off:.1e}"
    largest = max((float(grad.norm()) for grad in expected.gradients.values() if grad is not None), default=0.0)
    for name, grad in expected.gradients.items():
        other = numbers.gradients.get(name)
        if (grad is None) != (other is None):
            return f"{name} has a gradient in {'this layout' if grad is None else 'one process'} alone"
        if grad is not None and other is not None:
            off = float((other - grad).norm())
            if off > TOLERANCE * float(grad.norm()) + NOISE * largest:
                return f"the gradient of {name} off by {off / max(float(grad.norm()), NOISE * largest):.1e}"
    return None


def _say_sizes(mesh: ParallelMesh, axes: list[str]) -> str:
    return ",".join(f"{axis}_size={mesh.size(axis)}" for axis in axes)


def _say_ones(axes: list[str]) -> str:
    return ",".join(f"{axis}_size=1" for axis in axes)
