"""`accelerator.save_state` and `load_state`: the same folders as Trainer's checkpoints, with the same properties.

my_state/model.safetensors, config.json   a Hub folder; a second model in model_1/
my_state/optimizer/                       by parameter name; a second one in optimizer_1/
my_state/data_order.pt                    where each prepared loader is
my_state/scheduler.bin, random_states_3.pkl, custom_checkpoint_0.pkl, …   accelerate's own files
"""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from hf_parallel import checkpoint as folders
from hf_parallel.ask.session import of_process, of_session
from hf_parallel.checkpoint.slices import is_changed_alike, refuse_changes_of_rank_0
from hf_parallel.hooks import hangs, runtime
from hf_parallel.hooks.accelerate import processes
from hf_parallel.hooks.accelerate.accelerator import make_optimizer_ready
from hf_parallel.hooks.patching import patch
from hf_parallel.hooks.peft.adapters import is_saved_as_adapters, load_adapter_weights
from hf_parallel.hooks.trainer.checkpoints import get_inner_optimizer, write_layout
from hf_parallel.hooks.trainer.resuming import choose_rng_rank, find_all_damages, read_layout_of, refuse_damages
from hf_parallel.ranks import assert_all_ranks, desync, messages
from hf_parallel.ranks.mesh import RandomState
from hf_parallel.ranks.requests import take_requests

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.scheduler import AcceleratedScheduler
    from torch import nn

# ---- saving ------------------------------------------------------------------------------------------------------


@patch("accelerate.accelerator:Accelerator.save_state", "writes shards over one another")
def save_state(
    original: Callable, self: Accelerator, output_dir: str | None = None, *args: object, **kwargs: object
) -> str:
    """All ranks write one folder, which gets its name when it is whole."""
    refusals = [
        (runtime.mesh().config.async_save, "async_save=true", "async_save=false works (it is for Trainer)"),
        (
            any(getattr(loader, "use_stateful_dataloader", False) for loader in self._dataloaders),
            "use_stateful_dataloader=True",
            "skip_first_batches works",
        ),
    ]
    for asked, spelled, works in refusals:
        if asked:
            raise NotImplementedError(f"hf_parallel: save_state with {spelled} is not part of this version; {works}")
    advice = "call accelerator.save_state on all ranks, or put a barrier after it"
    if desync.meet_or_ask("accelerator.save_state", of_session(_Alone).requests.get(self), advice):  # rank 0 is alone
        for model in self._models:
            refuse_changes_of_rank_0(model)
        messages.send_from_one(lambda: (output_dir, self.step))
    return _save_together(self, output_dir)


def _save_together(self: Accelerator, output_dir: str | None) -> str:
    """Write the folder, and return its name. Collective."""
    mesh, naming = runtime.mesh(), self.project_configuration
    if naming.automatic_checkpoint_naming:
        final = os.path.join(self.project_dir, "checkpoints", f"checkpoint_{self.save_iteration}")
        if os.path.exists(final):
            raise ValueError(f"{final} exists; set project_configuration.iteration to the number to go on with")
    else:
        final = os.fspath(output_dir)  # type: ignore[arg-type]
    saving = folders.Checkpoint(mesh, final)
    saving.begin()
    with hangs.allow_long_phase("a save"):
        with folders.make_save_current(saving):
            _write_accelerator_state(self, saving)
        saving.commit()
    if naming.automatic_checkpoint_naming and mesh.rank == 0 and naming.total_limit is not None:
        for path in _list_numbered_folders(os.path.dirname(final))[: -naming.total_limit]:
            folders.remove(path)
    naming.iteration += 1
    return final


# ---- a save of rank 0 alone, as under `if accelerator.is_main_process:` -------------------------------------------
# The others make it where they next wait for rank 0, which may be after they have read the next batch.


@dataclass(eq=False)
class _Alone:
    """A save that rank 0 begins by itself.

    Attributes:
        requests: the number of each accelerator's request.
        random_states: of this rank, when the script began to ask who is the main process.
    """

    requests: weakref.WeakKeyDictionary[Accelerator, int] = field(default_factory=weakref.WeakKeyDictionary)
    random_states: tuple = ()

    def keep_random_states(self) -> None:
        self.random_states = processes.read_global_state(), runtime.mesh().read_random_state()


@patch("accelerate.accelerator:Accelerator.prepare_optimizer", "has what its model had; rank 0 cannot save its state")
def prepare_optimizer(
    original: Callable, self: Accelerator, optimizer: torch.optim.Optimizer, *args: object, **kwargs: object
) -> object:
    """Give it the parallel model's parameters; let rank 0 call `save_state` in a loop while the others wait for it."""
    make_optimizer_ready(optimizer)
    alone = of_session(_Alone)
    if runtime.is_loop() and self not in alone.requests:
        number = take_requests(self, _save_with_rank_0)
        if number is not None:
            alone.requests[self] = number
            of_process(desync.Answering).on_question = alone.keep_random_states
    return original(self, optimizer, *args, **kwargs)


def _save_with_rank_0(accelerator: Accelerator) -> None:
    if not all(is_changed_alike(model) for model in accelerator._models):
        return  # rank 0 refuses
    now = accelerator.step, processes.read_global_state(), runtime.mesh().read_random_state()
    output_dir, accelerator.step = cast("tuple[str | None, int]", messages.send_from_one(lambda: None))
    _set_random_states(*(of_session(_Alone).random_states or now[1:]))
    try:
        _save_together(accelerator, output_dir)
    finally:
        accelerator.step = now[0]
        _set_random_states(*now[1:])


def _set_random_states(state: tuple, of_torch: RandomState) -> None:
    processes.set_global_state(state)
    runtime.mesh().set_random_state(of_torch)


# ---- what a folder has ---------------------------------------------------------------------------------------------


def _write_accelerator_state(accelerator: Accelerator, saving: folders.Checkpoint) -> None:
    from accelerate.checkpointing import save_accelerator_state, save_custom_state

    mesh, folder = saving.mesh, saving.folder
    replaced = _run_save_hooks(accelerator, folder)
    for number, model in enumerate(accelerator._models):
        where = _number_file_name(folder, "model", number) if number else folder
        # Models of other libraries name their files as they like; `load_state` reads what accelerate would write.
        names_files = hasattr(model, "base_model_prefix") or hasattr(model, "peft_config")
        if number not in replaced and names_files:
            model.save_pretrained(where)
            continue
        tensors = replaced[number] if number in replaced else folders.gather_state_dict(model, mesh)
        if mesh.rank == 0 and tensors:
            from accelerate.utils import clean_state_dict_for_safetensors
            from safetensors.torch import save_file

            with saving.noting():
                os.makedirs(where, exist_ok=True)
                save_file(clean_state_dict_for_safetensors(tensors), os.path.join(where, "model.safetensors"))
    for number, optimizer in enumerate(accelerator._optimizers):
        model = _find_model_of(accelerator, optimizer)
        name = _number_file_name("", "optimizer", number)
        folders.save_optimizer_state(model, get_inner_optimizer(optimizer), mesh, folder, folder=name)
    schedulers, loaders = [each.scheduler for each in accelerator._schedulers], accelerator._dataloaders
    with saving.noting():
        state = (accelerator.step, accelerator.scaler)
        save_accelerator_state(folder, [], [], schedulers, loaders, mesh.rank, *state)
        for number, thing in enumerate(accelerator._custom_objects):
            save_custom_state(thing, folder, number)
    if mesh.rank == 0:
        with saving.noting():
            for number in range(len(accelerator._optimizers)):
                folders.write_refusal(_number_file_name(folder, "optimizer", number) + ".bin")
            write_layout(folder, {})
            processes.save_loader_places(loaders, folder)


def _run_save_hooks(accelerator: Accelerator, folder: str) -> dict[int, dict[str, torch.Tensor]]:
    """Run a script's hooks before a save, with whole weights on rank 0; what it alone saves in them the others share.

    Returns:
        The weights of models whose own the hooks have taken away (none), changed or replaced, by number. Hooks often
        save a model in a way of their own, and take its weights off the list.
    """
    hooks = list(accelerator._save_model_state_pre_hook.values())
    if not hooks:
        return {}
    weights = [accelerator.get_state_dict(model) for model in accelerator._models]
    own, held = list(weights), [list(map(id, state.values())) for state in weights]
    for hook in hooks:
        hook(accelerator._models, weights, folder)
        dist.barrier()  # at which the others take part in what rank 0 saves alone
    left = dict(enumerate(weights))
    kept = messages.send_from_one(
        lambda: [
            number
            for number, state in left.items()
            if state is own[number] and list(map(id, state.values())) == held[number]
        ]
    )
    return {number: left.get(number, {}) for number in range(len(own)) if number not in kept}


def _number_file_name(folder: str, stem: str, number: int) -> str:
    """Name a file as accelerate numbers its own: the first has no number."""
    return os.path.join(folder, f"{stem}_{number}" if number else stem)


def _find_model_of(accelerator: Accelerator, optimizer: torch.optim.Optimizer) -> nn.Module:
    """Return the model whose parameters an optimizer has."""
    own = {id(p) for group in get_inner_optimizer(optimizer).param_groups for p in group["params"]}
    models = accelerator._models
    return next((model for model in models if any(id(p) in own for p in model.parameters())), models[0])


# ---- the schedule in a file of the script's own --------------------------------------------------------------------
# accelerate steps a schedule once per data rank. The state that a script gets counts steps as in one process does.


@patch("accelerate.scheduler:AcceleratedScheduler.state_dict", "counts a step once per data rank")
def give_state_of_scheduler(original: Callable, self: AcceleratedScheduler) -> dict[str, Any]:
    """Return the state of one process."""
    return _scale_counts(self, original(self), 1 / runtime.mesh().data_size)


@patch("accelerate.scheduler:AcceleratedScheduler.load_state_dict", "counts a step once per data rank")
def take_state_of_scheduler(original: Callable, self: AcceleratedScheduler, state_dict: dict[str, Any]) -> None:
    """Load the state of one process."""
    own = getattr(self.scheduler, "total_steps", None)
    original(self, _scale_counts(self, state_dict, runtime.mesh().data_size))
    if own is not None:
        self.scheduler.total_steps = own


def _scale_counts(scheduler: AcceleratedScheduler, state: dict[str, Any], factor: float) -> dict[str, Any]:
    if scheduler.split_batches or not scheduler.step_with_optimizer:
        return state
    counts = {"last_epoch": 0, "_step_count": 1}  # and where they begin
    scaled = {key: first + round((state[key] - first) * factor) for key, first in counts.items() if key in state}
    return {**state, **scaled}


# ---- loading -----------------------------------------------------------------------------------------------------


@patch("accelerate.accelerator:Accelerator.load_state", "reads whole weights")
def load_state(
    original: Callable,
    self: Accelerator,
    input_dir: str | None = None,
    load_kwargs: object = None,
    **kwargs: object,
) -> None:
    """Each rank reads its slices, from a folder that is checked first."""
    assert_all_ranks("accelerator.load_state")
    folder = messages.send_from_one(lambda: _find_asked_or_newest(self, input_dir))  # alike on all ranks
    refuse_damages(folder, find_all_damages(folder))
    _load_state_from(self, folder, load_kwargs, choose_rng_rank(read_layout_of(folder)))
    processes.load_loader_places(self._dataloaders, folder)


@patch("accelerate.accelerator:Accelerator.load_state", "knows optimizer.bin only", without_layout=True)
def load_state_without_layout(
    original: Callable,
    self: Accelerator,
    input_dir: str | None = None,
    load_kwargs: object = None,
    **kwargs: object,
) -> None:
    """In one process or under DDP: what a layout has saved, beside what accelerate has."""
    folder = _find_asked_or_newest(self, input_dir)
    layout = read_layout_of(folder)
    if not layout:
        return original(self, folder, load_kwargs, **kwargs)
    refuse_damages(folder, folders.find_damages(folder))
    ranks = layout["data_ranks"]
    _load_state_from(self, folder, load_kwargs, ranks.index(self.process_index % (max(ranks) + 1)))
    processes.load_alone(folder)


def _find_asked_or_newest(accelerator: Accelerator, asked: str | None) -> str:
    """Choose a folder as accelerate does, but leave out folders that are not whole."""
    if asked is not None:
        if not os.path.isdir(asked):
            raise ValueError(f"Tried to find {asked} but folder does not exist")
        return os.fspath(asked)
    if not accelerator.project_configuration.automatic_checkpoint_naming:
        raise ValueError("No input_dir provided and automatic checkpoint naming is disabled.")
    place = os.path.join(accelerator.project_dir, "checkpoints")
    for path in reversed(_list_numbered_folders(place)):
        ours = os.path.isfile(os.path.join(path, folders.LAYOUT)) or folders.has_manifest(path)
        if not ours or not folders.find_damages(path, shares=0):
            return path
    raise ValueError(f"{place} has no whole checkpoint")


def _list_numbered_folders(folder: str) -> list[str]:
    """Automatically named folders, oldest first."""
    names = [name for name in os.listdir(folder) if re.fullmatch(r"checkpoint_\d+", name)]
    return [os.path.join(folder, name) for name in sorted(names, key=lambda name: int(name.rpartition("_")[2]))]


def _load_state_from(accelerator: Accelerator, folder: str, load_kwargs: object, rng: int) -> None:
    from accelerate.checkpointing import load_accelerator_state, load_custom_state

    left = list(accelerator._models)
    for hook in accelerator._load_model_state_pre_hook.values():  # which load a model, and take it off the list
        hook(left, folder)
    for number, model in enumerate(accelerator._models):
        if not any(model is one for one in left):
            continue
        inner, where = (
            accelerator.unwrap_model(model),
            _number_file_name(folder, "model", number) if number else folder,
        )
        if is_saved_as_adapters(inner):
            load_adapter_weights(inner, where)
        else:
            folders.load_weights(inner, where)
    for number, optimizer in enumerate(accelerator._optimizers):
        model, name = (
            accelerator.unwrap_model(_find_model_of(accelerator, optimizer)),
            _number_file_name("", "optimizer", number),
        )
        inner = get_inner_optimizer(optimizer)
        groups = []
        if not os.path.isdir(os.path.join(folder, name)):
            groups = [folders.list_names_of_groups(model, inner, runtime.mesh())]
        folders.load_optimizer_state(model, inner, folder, groups, folder=name, plain=f"{name}.bin")
    totals = [getattr(scheduler.scheduler, "total_steps", None) for scheduler in accelerator._schedulers]
    schedulers = [each.scheduler for each in accelerator._schedulers]
    rest = (schedulers, accelerator._dataloaders, rng, accelerator.scaler, "cpu", load_kwargs)
    accelerator.step = load_accelerator_state(folder, [], [], *rest).get("step", accelerator.step)
    if layout := read_layout_of(folder):
        then = max(layout["data_ranks"]) + 1
    else:  # plain accelerate's: a file of each process
        then = max(1, sum(name.startswith("random_states_") for name in os.listdir(folder)))
    now = accelerator.num_processes
    for scheduler, total in zip(accelerator._schedulers, totals, strict=True):
        if scheduler.split_batches or then == now:
            continue
        # accelerate steps a schedule once per data rank: as many of this run as there were of the other.
        for count in ("last_epoch", "_step_count"):
            setattr(scheduler.scheduler, count, round(getattr(scheduler.scheduler, count) * now / then))
        if total is not None:
            scheduler.scheduler.total_steps = total
    for number, thing in enumerate(accelerator._custom_objects):
        load_custom_state(thing, folder, number)
