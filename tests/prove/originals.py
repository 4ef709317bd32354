"""Scripts of other projects as they are, for `table.py`: those of tests/outside/originals.py, and some more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hf_parallel.cli.prove import Script
from tests.outside import stand_ins, sweep
from tests.outside.cases import Case
from tests.outside.originals import ALIGN, FIXED, LOOP, OLD_NAMES, ORIGINALS, PYTORCH, RUN, json_files

#: What users start with. TRL's are those of the installed version, run as modules.
FIRST = {
    "text-classification/run_glue": Case(
        f"{PYTORCH}/text-classification/run_glue.py",
        f"{json_files('pairs', 'train')} --model_name_or_path ROOT/bert --max_seq_length 33 {RUN}",
    ),
    "question-answering/run_qa": Case(
        f"{PYTORCH}/question-answering/run_qa.py",
        f"{json_files('squad', 'train')} --model_name_or_path ROOT/bert --max_seq_length 48 --doc_stride 16 {RUN}",
    ),
    "language-modeling/run_clm_no_trainer": Case(
        f"{PYTORCH}/language-modeling/run_clm_no_trainer.py",
        f"{json_files('texts', 'full')} --model_name_or_path ROOT/llama --block_size 33 {LOOP}",
        edits=OLD_NAMES,
    ),
    "nlp_example": Case("accelerate/examples/nlp_example.py", "--cpu", edits=FIXED),
    "complete_nlp_example": Case(
        "accelerate/examples/complete_nlp_example.py",
        "--cpu --checkpointing_steps epoch --output_dir OUT",
        edits=FIXED,
    ),
    "trl sft": Case("trl.scripts.sft", f"--dataset_name ROOT/texts --max_length 64 {ALIGN}"),
    "trl sft, LoRA": Case(
        "trl.scripts.sft", f"--dataset_name ROOT/texts --max_length 64 --use_peft --lora_dropout 0 {ALIGN}"
    ),
    "trl dpo": Case("trl.scripts.dpo", f"--dataset_name ROOT/preferences --max_length 64 {ALIGN}"),
    "trl kto": Case("trl.scripts.kto", f"--dataset_name ROOT/preferences --max_length 64 {ALIGN}"),
    "trl reward": Case("trl.scripts.reward", f"--dataset_name ROOT/preferences --max_length 64 {ALIGN}"),
}


def original_scripts(sources: str, folder: Path, parts: list[str]) -> Iterator[tuple[str, Script]]:
    """Name the scripts that have one of the parts in their names, with arguments for models and data in `folder`."""
    desk = sweep.Desk(sources, str(folder))
    sweep.preload()
    stand_ins.install()
    for name, case in {**FIRST, **ORIGINALS}.items():
        if not any(part in name for part in parts):
            continue
        places = {"ROOT": str(desk.root), "OUT": str(folder / "out"), "SOURCES": sources, "ROWS": "8"}
        is_module = not case.script.endswith(".py")
        path = case.script if is_module else str(desk.script(case, places).resolve())
        arguments = case.arguments.replace("SOURCES", sources)
        yield name, Script(path, case.words(arguments, places["ROOT"], places["OUT"], None), is_module)
