"""The only room that knows the internals of Trainer, Accelerate and transformers' loader.

`activate` makes this process part of a layout: it creates the process group and the mesh and puts all that is declared
with `@patch` in place. Without it nothing of those libraries changes.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field

from hf_parallel.ask import launched
from hf_parallel.ask.config import AUTO, ParallelConfig, SpecError
from hf_parallel.ask.session import end_session, of_session
from hf_parallel.ask.spec import refuse
from hf_parallel.hooks.patching import Patch, Undo, apply_patches, check_torch, list_newer_libraries, undo

# torch and transformers are imported inside the functions: `import hf_parallel` must stay cheap.


@dataclass
class _InPlace:
    """The patches of the layout, none where there is none; how to undo these, and those of a process without one."""

    of_layout: list[Patch] = field(default_factory=list)
    undo_list: list[Undo] = field(default_factory=list)


def activate(spec: str | ParallelConfig, source: str = "activate()") -> None:
    """Run everything from here on under `spec`. The same spec again changes nothing.

    Args:
        spec: a spec string, the path of a YAML file, a `ParallelConfig`, or "auto": chosen by the planner at the
            script's first model.
        source: who asked, for the message when two specs conflict.

    Raises:
        SpecError: the spec is not understood, does not fit the processes, or conflicts with the active one.
    """
    import torch.distributed as dist

    from hf_parallel.hooks import auto, report, runtime

    current = runtime.current()
    if not (dist.is_available() and dist.is_initialized()):
        launched.settle_launcher()
    if spec == AUTO:
        if current is not None and not current.source.endswith("(auto)"):
            refuse(f"{source} asks for auto", f"{current.source} set {current.config.to_spec()}", do="drop one")
        if current is None and _read_expected_world_size() > 1:
            auto.wait(source, activate)
        return
    config = ParallelConfig.parse(spec).resolve(_read_expected_world_size())
    if auto.who_waits() is not None:
        refuse(f"{source} asks for {config.to_spec()}", f"{auto.who_waits()} asks for auto", do="give one of them")
    if current is not None:
        _check_same(source, config, current.source, current.config)
        return
    if config.world_size == 1:
        # One process has nobody to share a model with: the keys that need several ranks are named.
        done = {"pack_tokens", "padding_free", *config.settings_alone(), *(f"{axis}_size" for axis in config.sizes)}
        left = [f"{name}={value}" for name, value in config.spelled().items() if name not in done and value != "off"]
        if left:
            needs = "which need several processes (--num_processes 2)"
            report.say(f"one process trains without {', '.join(left)}, {needs}")
        if not config.settings_alone():  # it trains as plain Trainer does, and reads the checkpoints of layouts
            read_checkpoints()
            if config.pack_tokens or config.padding_free:
                from hf_parallel.hooks.trainer.token_budget import list_patches_alone

                of_session(_InPlace).undo_list.extend(apply_patches(list_patches_alone(config)))
            return
    notes = [*check_torch(), *list_newer_libraries()]
    runtime.start(config, source)
    for note in notes:
        report.say(note)
    from hf_parallel.hooks import device_order, library, own_loops
    from hf_parallel.hooks.patches import list_patches  # imports transformers, after the process group exists

    undo(of_session(library.InPlace).undo_list)
    in_place = of_session(_InPlace)
    try:
        in_place.undo_list.extend(apply_patches(list_patches()))
    except SpecError:
        runtime.stop()
        raise
    in_place.of_layout.extend(list_patches())
    own_loops.watch_optimizers()
    device_order.warn_of_device_order(config)


def check_agreement(source: str, spec: str | ParallelConfig, other_source: str, other_spec: str) -> None:
    """Before processes connect: two places that both ask for a layout must ask for the same.

    Raises:
        SpecError: they do not. Where one asks for auto, `activate` tells.
    """
    if AUTO in (spec, other_spec):
        return
    ours, theirs = ParallelConfig.parse(spec), ParallelConfig.parse(other_spec)
    if ours != theirs:  # they may still come to the same for this number of processes
        processes = _read_expected_world_size()
        _check_same(source, ours.resolve(processes), other_source, theirs.resolve(processes))


def _check_same(source: str, config: ParallelConfig, other_source: str, other: ParallelConfig) -> None:
    if other != config:
        do = "give one of them, or the same in both"
        refuse(f"{source} asks for {config.to_spec()}", f"{other_source} set {other.to_spec()}", do=do)


def read_checkpoints(opened: str | None = None) -> None:
    """Without a layout: let plain Trainer resume from the checkpoints of layouts. Nothing else changes.

    Args:
        opened: one that a resuming Trainer has already begun to read: it is checked.
    """
    from hf_parallel.hooks.patches import list_patches
    from hf_parallel.hooks.trainer.resuming import find_checkpoint_damages, refuse_damages

    undo_list = of_session(_InPlace).undo_list
    if not undo_list:
        if opened is not None:
            refuse_damages(opened, find_checkpoint_damages(opened, 0, 1))
        with contextlib.suppress(SpecError):  # a version that cannot be patched: a plain run must go on as it is
            undo_list.extend(apply_patches(list_patches(without_layout=True)))


def is_active() -> bool:
    """Return whether this process is part of a layout."""
    return bool(of_session(_InPlace).of_layout)


def is_expected() -> bool:
    """Return whether a layout is active, or will be as soon as the script shows its model."""
    from hf_parallel.hooks import auto

    return is_active() or auto.who_waits() is not None


def deactivate() -> None:
    """Undo every patch and forget the layout; the process group stays."""
    from hf_parallel.hooks import auto, hangs, monitoring, runtime

    auto.stop_waiting()
    hangs.end_loop()
    monitoring.stop_watching()
    undo(of_session(_InPlace).undo_list)
    runtime.stop()
    end_session()


def _read_expected_world_size() -> int:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))
