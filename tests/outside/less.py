"""LESS, whose adapters are trained before its gradients choose examples, read from a checkout."""

from tests.outside.cases import TRAINER, Case

SCRIPT = "LESS/less/train/train.py"
EDITS = (
    ("import sys\nimport time\n", "import sys\nimport time\nsys.path.insert(0, 'SOURCES/LESS')\n"),
    (
        "        tokenizer=tokenizer,\n        data_collator",
        "        processing_class=tokenizer,\n        data_collator",
    ),
)
RUN = (
    f"--model_name_or_path ROOT/llama --train_files ROOT/chats/train.jsonl --max_seq_length 49 {TRAINER} "
    "--max_steps 3 --torch_dtype float32 --lora_dropout 0 --lora_target_modules q_proj down_proj --percentage 0.9"
)
LESS = {
    "LESS train.py": Case(SCRIPT, f"{RUN} --lora True --gradient_accumulation_steps 2", edits=EDITS),
    "LESS train.py, full": Case(SCRIPT, f"{RUN} --lora False", edits=EDITS),
}
