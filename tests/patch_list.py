"""Write docs/reference/patches.md: every place where another library is changed while a layout is active.

python -m tests.patch_list            write it
python -m tests.patch_list --check    fail if it is out of date
"""

import argparse
import importlib.util
import pkgutil
import sys
from itertools import groupby
from pathlib import Path

import hf_parallel
from hf_parallel.ask.replaced import Replaced
from hf_parallel.hooks.patches import list_patches
from hf_parallel.hooks.patching import Patch

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "patches.md"
COMMAND = "python -m tests.patch_list"
TEXT = """# Patches

Every place where another library is changed while a layout is active, and what the original does that would be wrong
there. `{command}` writes this page from the `@patch(target, why)` beside each replacement, and
from `REPLACES` of modules that have another way; a test trains under layouts and finds nothing else replaced in torch,
Transformers, Accelerate, PEFT and TRL.

Those of libraries that not every script uses are put in place when a script imports them. One whose target is gone, or
takes other parameters than it is known to take, is refused by name. The last column: *private*, the name begins with
an underscore; *since*, the version that introduced it; *before*, the one that made the patch needless; *copies*,
modules that have imported it by name get the replacement too. Functions that change together
(`{{grpo,rloo}}_trainer:pad`) share one replacement, a function here.

{counts}

On objects, not on classes: a Trainer's `compute_loss` and `prediction_step`, `on_save` and `on_step_end` of its
callbacks, `save_pretrained` and the like of a parallel model, `__new__` of the class that FSDP2 makes for one of
sentence-transformers; `generate` of TRL's way to a server where completions are drawn ahead, and its `model` while
weights are sent; in a ragged batch of an evaluation, while it is computed, `gather_for_metrics` of an Accelerator and
what TRL's generating trainers ask for lengths and scores (`_generate`, `_get_per_token_logps_and_entropies`).

Of 153 targets by 116 replacements, 33 of them private, {targets} by {replacements} are left, {private} of them
private. The losses of TRL are weighed where all losses are, its casts are finished when its Trainer is made, its seeds
follow from `process_index`; optimizers' steps are told by torch's hooks, the fp16 scaler is exchanged in `prepare`,
rows are grouped in the sampler that it is given. New heads are whole inside the public `initialize_weights`, adapters
are split where `PeftModel`'s public methods end, rewards count where they are gathered, and TRL sends the weights of a
model that stands for the whole one. One that looked needless is needed, as tests say: `is_fsdp_managed_module` (torch
marks what it shards, and Trainer then asks a config that is not there).

What was looked at to need fewer, and why it is not done:

- *The number and index of processes as values of accelerate's states.* `TrainingArguments` and scripts make the states
  anew, and what is set in them would have to be taken back when a layout ends; a property of the class answers.
- *`inject_adapter` of PEFT alone.* Adapters are split after PEFT's last change, at the end of `PeftModel.__init__` and
  `add_adapter`; in `inject_adapter` it is not known yet which dtype they will have.
- *One subclass of `Accelerator` bound in its place.* It serves no `Accelerator` that exists already: scripts make
  theirs before `TrainingArguments(parallel=…)`, and `--parallel auto` chooses inside the `prepare` of one. Those would
  wrap a model in DDP without a word. After it `isinstance(accelerator, Accelerator)` is false for them, and a class
  that a library has derived, or a name under which it has imported `Accelerator`, stays the old one.
- *`_register_custom_module` of PEFT.* It is of one `LoraConfig`, for layers that this config makes: not for adapters
  that a model has when the layout begins, not for `target_parameters` and the layers of DoRA, and it goes before
  PEFT's own choice of 4-bit layers. `type(layer)` and `print(model)` would show other classes.
- *One mode (`TorchFunctionMode`) for the losses of `torch.nn.functional`.* It is called for each operation of each
  forward pass, not for eight functions, and `torch.compile` would see it.
- *A rule of `DTensor` for random numbers.* `register_sharding` says where an operation runs, not that every rank draws
  the whole tensor; `__torch_function__` on the class would be called for every operation of the optimizer.
- *Callbacks in the place of Trainer's private methods.* No event lies between a checkpoint's files and the place that
  reads them, and scripts override `_save` and call `_get_num_items_in_batch` themselves. A private target that is gone
  stops the start by name; a callback that comes too late does not.
- *KTO's pairs made anew when its Trainer is made.* `evaluate` of a data set of its own computes the reference's
  log-probabilities of the pairs before it calls a public method of Trainer.
- *`is_distributed_loading_by_transformers` left off, against `_sync_replicated_trainable_parameters`.* Trainer would
  then give its model to `prepare` as a loop does, and be watched and scaled as one.

Where no layout is active, four targets change, so that plain Trainer resumes from the checkpoints of layouts.
"""


def page() -> str:
    """The page as it must be."""
    patches = list_patches()
    parts = [
        TEXT.format(command=COMMAND, counts=_counts(patches), **_numbers(patches)),
        *(_section(name, patches) for name in _libraries(patches)),
    ]
    parts.append("\n".join(["## By other ways than a patch", "", *_other_rows()]) + "\n")
    parts.append("\n".join(["## Without a layout", "", *_rows(list_patches(without_layout=True))]) + "\n")
    return "\n".join(parts)


def other_replacements() -> dict[Replaced, str]:
    """What modules of the package list in `REPLACES`, and the module."""
    names = [
        name for _, name, _ in pkgutil.walk_packages(hf_parallel.__path__, "hf_parallel.") if "__main__" not in name
    ]
    found: dict[Replaced, str] = {}
    for name in names:
        if "REPLACES = " in Path(importlib.util.find_spec(name).origin).read_text(encoding="utf-8"):
            found.update(dict.fromkeys(importlib.import_module(name).REPLACES, name))
    return found


def _other_rows() -> list[str]:
    """Attributes of one owner that are replaced for one reason share a row."""
    rows = ["| target | why | when | by |", "| --- | --- | --- | --- |"]

    def together(item: tuple[Replaced, str]) -> tuple:
        return item[0].target.rpartition(".")[0], *item[0][1:], item[1]

    for (owner, why, when, room), found in groupby(sorted(other_replacements().items(), key=together), together):
        names = [replaced.target.rpartition(".")[2] for replaced, _ in found]
        shown = names[0] if len(names) == 1 else "{" + ",".join(sorted(names)) + "}"
        rows.append(
            f"| `{owner}.{shown}` | {why} | {when} | {room.removeprefix('hf_parallel.').replace('.', '/')}.py |"
        )
    return rows


def _libraries(patches: list[Patch]) -> list[str]:
    return list(dict.fromkeys(patch.library for patch in patches))


def _of(library: str, patches: list[Patch]) -> list[Patch]:
    return [patch for patch in patches if patch.library == library]


def _is_private(patch: Patch) -> bool:
    """Is the target none of the library's promises?"""
    names = patch.target.partition(":")[2].split(".")
    return any(name.startswith("_") and not name.endswith("__") for name in names)


def _numbers(patches: list[Patch]) -> dict[str, int]:
    private = sum(map(_is_private, patches))
    return {"targets": len(patches), "replacements": len({patch.make for patch in patches}), "private": private}


def _counts(patches: list[Patch]) -> str:
    heads = ("library", "classes and functions", "replacements", "targets", "public", "private")
    rows = [f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads)]
    for name, found in [*((name, _of(name, patches)) for name in _libraries(patches)), ("all", patches)]:
        private = sum(map(_is_private, found))
        # The class of a method, else the name itself.
        targets = {patch.target for patch in found}
        owners = {target.rpartition(".")[0] if "." in target.partition(":")[2] else target for target in targets}
        made = len({patch.make for patch in found})
        rows.append(f"| {name} | {len(owners)} | {made} | {len(found)} | {len(found) - private} | {private} |")
    return "\n".join(rows)


def _section(library: str, patches: list[Patch]) -> str:
    return "\n".join([f"## {library}", "", *_rows(_of(library, patches))]) + "\n"


def _rows(patches: list[Patch]) -> list[str]:
    """A table; targets in the order in which they are replaced, those of one module together."""
    rows = ["| target | why | by | |", "| --- | --- | --- | --- |"]
    order = {patch.module: place for place, patch in reversed(list(enumerate(patches)))}
    for _, found in groupby(sorted(patches, key=lambda patch: order[patch.module]), lambda patch: patch.module):
        rows += [_row(patch) for patch in found]
    return rows


def _row(patch: Patch) -> str:
    notes = ["private"] * _is_private(patch) + ["copies"] * patch.copies
    notes += [f"since {patch.since}"] if patch.since else []
    notes += [f"before {patch.before}"] if patch.before else []
    by = patch.room.removeprefix("hf_parallel.hooks.").replace(".", "/")
    return f"| `{patch.target}` | {patch.reason} | {by}.py | {', '.join(notes)} |".replace("  ", " ")


def main(arguments: list[str] | None = None) -> int:
    """Write or check the page; 0 when it is right afterwards."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail if the page is out of date")
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    old, new = options.page.read_text(encoding="utf-8") if options.page.exists() else "", page()
    if options.check and new != old:
        print(f"docs/reference/{options.page.name} is out of date: run {COMMAND}", file=sys.stderr)
        return 1
    if new != old:
        options.page.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
