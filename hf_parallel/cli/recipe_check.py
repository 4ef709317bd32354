"""Prove a recipe here: its keys, its model, does it fit by the planner and by a dry run, is `expect` so.

Nothing is downloaded for a recipe that names the `shape` of its model, and no GPU is needed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from hf_parallel.ask.config import ParallelConfig, SpecError
from hf_parallel.ask.spec import HUB_FILE
from hf_parallel.cli.recipe_file import Recipe, load_recipe, render_markdown
from hf_parallel.hooks.auto import ScriptBatch, read_script_batch
from hf_parallel.planner.choices import predict_choice
from hf_parallel.planner.dryrun import dry_run
from hf_parallel.planner.dryrun.run import end_ranks
from hf_parallel.planner.hardware import HEADROOM
from hf_parallel.planner.memory import GIB
from hf_parallel.planner.search import make_goal
from hf_parallel.planner.shape import ModelShape, shape_of

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from torch import nn


# ---- Expectations of a recipe: memory and speed by the planner, memory by a dry run of the real code
# Both are for the recipe's own machines and need neither a GPU nor a network. What the planner does not know is put on
# top here, and said in the note: the second model of DPO, the generation of GRPO.

#: The share of a forward and backward that the forward of DPO's reference adds: one part in three.
_REFERENCE_FORWARD = 1 / 3
#: Calls of a step that a dry run makes: the third holds what the second does.
_CALLS = 2


@dataclasses.dataclass(frozen=True)
class Plan:
    """The planner's numbers for a recipe; `memory_gib` is the memory that the fullest GPU must have."""

    memory_gib: float
    step_s: float
    tokens_per_s: float
    within: float
    room_gib: float
    note: str = ""

    def to_dict(self) -> dict[str, object]:
        """Return the values for `expect`, in three digits."""
        values = {key: _round_to_digits(getattr(self, key)) for key in ("memory_gib", "step_s", "tokens_per_s")}
        return {**values, "within": self.within, **({"note": self.note} if self.note else {})}


def plan_recipe(recipe: Recipe) -> Plan:
    """Return the planner's numbers: those of `hf-parallel plan` for this layout and batch.

    Raises:
        SpecError: the batch cannot be cut as the layout asks, or a name is not known.
    """
    (layout, batch, adapt), notes = _read_training(recipe), []
    goal = make_goal(
        model=recipe.config(),
        cluster=recipe.hardware.cluster,
        seq=recipe.seq,
        precision=batch.precision,
        adapt=adapt,
        kernel=recipe.script_arguments.get("attn_implementation"),
        documents=batch.documents,
        global_batch=None,
        optimizer=batch.optimizer,
        lora=recipe.adapter_rank,
        rows=recipe.rows,
        accumulation=recipe.accumulation,
        four_bit=recipe.four_bit,
    )
    parts = (recipe.layout.pipeline_microbatches or recipe.rows) if recipe.layout.pp_size > 1 else 1
    choice = predict_choice(goal, layout, recipe.rows // parts)
    memory, seconds = choice.needed_gib, choice.step_time_s
    if recipe.method == "dpo":
        seconds *= 1 + _REFERENCE_FORWARD
        memory += 0.0 if recipe.adapter_rank else _compute_second_model(layout, batch, goal.shape)
        notes.append("rows are pairs, a reference beside them")
    if recipe.method == "grpo":
        notes.append("of the update; generation comes on top")
    within = choice.prediction.uncertainty
    room, rate = choice.prediction.cluster.gpu.memory_gib, recipe.tokens_per_step / seconds
    return Plan(memory, seconds, rate, within, room, "; ".join(notes))


#: Ranks of a layout that is proved on one machine.
_MOST_RANKS = 8


def shrink_layout(recipe: Recipe) -> ParallelConfig:
    """Return the layout with fewer ranks: two of each data axis, and of the others too if more than 8 are left."""
    layout = recipe.layout
    small = {name: min(2, getattr(layout, name)) for name in ("dp_replicate_size", "dp_shard_size", "ep_size")}
    ranks = math.prod((small["dp_replicate_size"], small["dp_shard_size"], layout.tp_size, layout.cp_size))
    if ranks * layout.pp_size > _MOST_RANKS:
        small |= {name: min(2, getattr(layout, name)) for name in ("tp_size", "cp_size", "pp_size")}
    more: dict[str, object] = {}
    if layout.context_parallel.startswith("hybrid") and "cp_size" in small:
        small["cp_size"], more["context_parallel"] = 4, "hybrid:2"
    if layout.tp_col_size > 1 and "tp_size" in small:
        small["tp_size"], more["tp_mesh"] = 4, "2x2"
    if layout.pipeline_microbatches is not None:
        more["pipeline_microbatches"] = min(layout.pipeline_microbatches, 2 * small.get("pp_size", layout.pp_size))
    return dataclasses.replace(layout, **small, **more)  # type: ignore[arg-type]


def _read_training(recipe: Recipe) -> tuple[ParallelConfig, ScriptBatch, Callable[[nn.Module], None] | None]:
    """Return the layout, the script's precision and optimizer, and what puts adapters into a model without memory."""
    from hf_parallel.hooks.peft.planned_adapters import plan_lora

    # Logits count unless the layout says otherwise, because a script may compute its loss by itself
    layout = recipe.layout
    layout = layout if layout.lean_loss == "true" else dataclasses.replace(layout, lean_loss="false")
    words = [f"--{key}={value}" for key, value in recipe.arguments.items()]  # as `--parallel auto` reads them
    dtype = recipe.script_arguments.get("dtype", "bfloat16" if recipe.script is None else "float32")
    batch = read_script_batch(None, words, "bfloat16" if recipe.four_bit else dtype)
    targets = recipe.script_arguments.get("lora_target_modules", "all-linear")
    return layout, batch, plan_lora(recipe.adapter_rank, targets) if recipe.adapter_rank else None


def _compute_second_model(layout: ParallelConfig, batch: ScriptBatch, shape: ModelShape) -> float:
    """Return the GiB of the reference's weights on a rank."""
    width = 2 if batch.precision == "bf16" else 4
    parts = layout.tp_size * layout.pp_size * layout.cp_size * (layout.dp_shard_size if layout.zero_stage else 1)
    return width * shape.parameters / parts / GIB


# ---- the dry run -------------------------------------------------------------------------------------------------


def measure_dry_memory(recipe: Recipe) -> float:
    """Return the GiB of tensors on the fuller one of the first and the last pipeline rank.

    Both are run dry in the whole world, because they hold embedding and head.

    Raises:
        SpecError: the layout cannot hold for this model.
    """
    from hf_parallel.hooks.peft.planned_adapters import plan_four_bit

    (layout, batch, adapt), config = _read_training(recipe), recipe.config()
    nested = bool(recipe.script_arguments.get("use_bnb_nested_quant"))
    runs = [
        dry_run(
            config,
            layout,
            rank=rank,
            rows=recipe.rows,
            seq=recipe.seq,
            accumulation=min(recipe.accumulation, _CALLS),
            optimizer=batch.optimizer,
            precision=batch.precision,
            adapt=adapt,
            pack=plan_four_bit(nested) if recipe.four_bit else None,
        )
        for rank in end_ranks(layout)
    ]
    second = recipe.method == "dpo" and not recipe.adapter_rank
    beside = _compute_second_model(layout, batch, shape_of(recipe.config())) if second else 0.0
    return max(run.peak_bytes for run in runs) / GIB + beside


# ---- as it is written --------------------------------------------------------------------------------------------


def _round_to_digits(number: float) -> float | int:
    """Round to three digits."""
    rounded = float(f"{number:.3g}")
    return int(rounded) if rounded >= 100 else rounded


#: The tolerance for a written number: three digits were kept, and the planner's formulas move a little.
TOLERANCE = 0.02


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The outcome of a check: what was found, in a line, and what is wrong with the recipe."""

    name: str
    found: str = ""
    wrong: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([f"{self.name}: {self.found or 'not read'}", *(f"  wrong: {line}" for line in self.wrong)])


def check_recipe(name: str, dry: bool = True) -> Verdict:
    """Check a recipe.

    Args:
        dry: run its first and last pipeline rank on tensors without memory, too, for a few seconds.
    """
    try:
        recipe = load_recipe(name)
        planned = plan_recipe(recipe)
        memory = measure_dry_memory(recipe) if dry else (recipe.expect.get("dry_run") or {}).get("memory_gib", 0.0)
    except SpecError as error:
        return Verdict(name, wrong=(str(error),))
    room, written = f"{planned.room_gib:.1f} GiB of a GPU", recipe.expect
    found = [f"planner {planned.memory_gib:.1f} of {room}, {planned.tokens_per_s:,.0f} tokens/s"]
    wrong = _list_wrong_numbers("planner", written, planned.to_dict())
    if planned.memory_gib > planned.room_gib * (1 - HEADROOM / 100):
        free = f"{HEADROOM:g} % of which stay free"
        wrong.append(f"needs {planned.memory_gib:.1f} GiB by the planner, of {room}, {free}")
    if dry:
        found.append(f"dry run {memory:.1f} GiB of tensors")
        wrong += _list_wrong_numbers("dry_run", written, {"memory_gib": memory})
    if memory > planned.room_gib:
        wrong.append(f"needs {memory:.1f} GiB in a dry run, of {room}")
    return Verdict(recipe.name, ", ".join(found), tuple(wrong))


def _list_wrong_numbers(source: str, written: dict[str, dict], new: Mapping[str, object]) -> list[str]:
    """Return a line for each number of `expect` that is no longer so."""
    old, again = written.get(source) or {}, "`hf-parallel recipe check --write` makes it anew"
    if not old:
        return [f"expect has no {source}; {again}"]
    return [
        f"expect: {source}: {key} is {old.get(key)}, now {value:.3g}; {again}"
        for key, value in new.items()
        if isinstance(value, (int, float)) and abs(value - old.get(key, 0)) > TOLERANCE * abs(value)
    ]


def write_expected(name: str) -> Recipe:
    """Write the section `expect` of a recipe's file anew; the rest stays as it is.

    Raises:
        SpecError: it cannot be read, or its layout cannot hold.
    """
    recipe = load_recipe(name)
    path = Path(recipe.path)
    kept = path.read_text(encoding="utf-8").partition("\nexpect:")[0].rstrip("\n")
    lines = ["expect:  # by `hf-parallel recipe check --write`; nothing here was measured unless it says so"]
    expected: dict[str, dict[str, object]] = {
        "planner": plan_recipe(recipe).to_dict(),
        "dry_run": {"memory_gib": _round_to_digits(measure_dry_memory(recipe))},
        **{key: value for key, value in recipe.expect.items() if key == "measured"},  # stays
    }
    for source, values in expected.items():
        text = yaml.safe_dump(values, sort_keys=False, default_flow_style=True, width=1000).strip()
        lines.append(f"  {source}: {text}")
    path.write_text("\n".join([kept, *lines]) + "\n", encoding="utf-8")
    return load_recipe(name)


# ---- A recipe into a repository of the Hub: the file, and a section of its model card that says how to run it
# The section stands between two markers, so that a second push replaces it and leaves the rest of the card alone.


_BEGIN, _END = "<!-- hf-parallel-recipe:{file}:begin -->", "<!-- hf-parallel-recipe:{file}:end -->"
_CARD = "README.md"


def push_recipe(
    recipe: Recipe, repo: str, file: str = HUB_FILE, private: bool | None = None, api: HfApi | None = None
) -> str:
    """Upload file and card in one commit and return its address.

    Args:
        api: a `HfApi`; default: one with the token of this machine.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    api = api or HfApi()
    api.create_repo(repo, private=private, exist_ok=True)
    begin, end = _BEGIN.format(file=file), _END.format(file=file)
    marked = f"{begin}\n{make_card_section(recipe, repo, file)}{end}\n"
    card = f"---\ntags:\n- hf-parallel\n- recipe\n---\n\n{marked}"
    if api.file_exists(repo, _CARD):
        former = Path(api.hf_hub_download(repo, _CARD)).read_text(encoding="utf-8")
        before, found, rest = former.partition(begin)
        card = f"{former.rstrip()}\n\n{marked}"
        if found:
            card = before + marked + rest.partition(end)[2].removeprefix("\n")
    operations = [
        CommitOperationAdd(file, Path(recipe.path).read_bytes()),
        CommitOperationAdd(_CARD, card.encode("utf-8")),
    ]
    return str(api.create_commit(repo, operations, commit_message=f"Add the recipe {file}").commit_url)


def make_card_section(recipe: Recipe, repo: str, file: str = HUB_FILE) -> str:
    """Return the section for the model card."""
    source = repo if file == HUB_FILE else f"{repo}:{file}"
    script = "" if recipe.script else " train.py"
    return f"""## Recipe: {recipe.about}

```
pip install "hf-parallel[trl,lora]"
hf-parallel recipe check {source}
hf-parallel recipe run {source}{script} --output_dir out
```

{render_markdown([recipe])}
Memory by the planner and by a dry run, speed by the planner, unless a number says that it was measured.
[{file}]({file}) is plain YAML; nothing of it is run as code.
"""
