"""resolve(config, anatomy): what will be done, or why not. The only place that refuses.

anatomy = read(model, config)        what the model is
plan = resolve(config, anatomy)      what will be done to it: data that prints
apply(model, plan, mesh)             does it (`parallelize.py`)
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from hf_parallel.axes.axis import Axis, Plan
from hf_parallel.axes.order import AXES
from hf_parallel.config import ParallelConfig, SpecError
from hf_parallel.model.anatomy import Anatomy, read_anatomy
from hf_parallel.spec import refuse_with


def read(model: nn.Module, config: ParallelConfig, axes: tuple[Axis, ...] = AXES) -> Anatomy:
    """Read a model as far as this config asks for it; the model is not changed."""
    anatomy = read_anatomy(model)
    asking = [axis for axis in axes if axis.is_on(config) and (anatomy.is_transformers or not axis.inside)]
    return replace(anatomy, facts={axis.name: axis.read(model, config) for axis in asking})


def resolve(config: ParallelConfig, anatomy: Anatomy, axes: tuple[Axis, ...] = AXES) -> Plan:
    """Return the plan for a model.

    Raises:
        SpecError: the first thing that stops it.
    """
    plan = draft(config, anatomy, axes)
    if plan.problems:
        refuse_with(plan.problems[0])
    return plan


def draft(config: ParallelConfig, anatomy: Anatomy, axes: tuple[Axis, ...] = AXES) -> Plan:
    """Return the plan with everything that stops it; an axis that refuses has no part in it."""
    plan = Plan(config, anatomy, axes, problems=tuple(_general_problems(anatomy)))
    for axis in axes:
        if axis.is_on(config):
            plan = _with_axis(plan, axis)
    return plan


def _with_axis(plan: Plan, axis: Axis) -> Plan:
    try:
        reason = _why_not_inside(plan, axis) if axis.inside else None
        if reason is not None:
            refuse_with(reason)
        part = axis.resolve(plan.config, plan.anatomy, plan.anatomy.facts[axis.name])
    except SpecError as error:
        return replace(plan, problems=(*plan.problems, str(error)))
    notes = () if part is None else tuple(axis.notes(part))
    return replace(
        plan,
        config=axis.settle(plan.config, part),
        parts={**plan.parts, axis.name: part},
        notes=(*plan.notes, *notes),
    )


def _why_not_inside(plan: Plan, axis: Axis) -> str | None:
    """Why an axis that cuts a model inside cannot."""
    key, anatomy = f"{axis.name}_size", plan.anatomy
    asked, works = f"{key}={getattr(plan.config, key)}", f"{key}=1 with dp_shard works"
    if not anatomy.is_transformers:
        return f"{asked}: {anatomy.name} is not a transformers model; {works}"
    if anatomy.replaced_forward is not None:
        return (
            f"{asked}: {anatomy.replaced_forward} has a forward of its own, as Liger puts on modules, which a split "
            f"would not change; TrainingArguments(use_liger_kernel=True) puts it on after the split, or {works}"
        )
    return None


def _general_problems(anatomy: Anatomy) -> list[str]:
    found = [
        (anatomy.is_parallel, f"{anatomy.name} is parallel already; parallelize it once"),
        (
            anatomy.is_quantised,
            f"{anatomy.name} is quantised already, in layers that cannot be cut; under "
            "`python -m hf_parallel --parallel SPEC` from_pretrained packs each rank's part in 4 bits, which works",
        ),
        (
            anatomy.of_quantised and not anatomy.is_quantised,
            "quantised checkpoints: not part of this version; load in bf16, or pack that in 4 bits",
        ),
        (anatomy.partly_on_meta, f"{anatomy.name} is partly on the meta device; load it fully or not at all"),
    ]
    return [line for stops, line in found if stops]
