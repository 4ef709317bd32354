"""colpali's trainings of ColQwen2, read from a checkout."""

from tests.outside.cases import Case

SCRIPT = "colpali/scripts/configs/qwen2/train_colqwen2_model.py"
#: Where its package lies, and small numbers in the place of those that are written into the script.
EDITS = (
    ("import argparse\n", "import argparse\nimport sys\nsys.path.insert(0, 'SOURCES/colpali')\n"),
    ("./models/base_models/colqwen2-base", "ROOT/qwen2_vl"),
    ("./data_dir/colpali_train_set", "ROOT/pages"),
    (
        "load_train_set()",
        'ColPaliEngineDataset(load_dataset("ROOT/pages", split="train"), pos_target_column_name="image")',
    ),
    ("torch_dtype=torch.bfloat16", "dtype=torch.float32"),
    ("            use_cache=False,\n", ""),  # which Transformers 5 hands to the class
    ("flash_attention_2", "sdpa"),
    ("overwrite_output_dir=True,", ""),
    (
        "num_train_epochs=5",
        "max_steps=5, dataloader_drop_last=True, adam_epsilon=1e-3, use_cpu=True, report_to='none', disable_tqdm=True",
    ),
    ("per_device_train_batch_size=64", "per_device_train_batch_size=ROWS"),
    ("per_device_eval_batch_size=16", "per_device_eval_batch_size=ROWS"),
    ("dataloader_num_workers=8", "dataloader_num_workers=0"),
    ("logging_steps=10,", "logging_steps=1,"),
    ("eval_steps=100", "eval_steps=2"),
    ("warmup_steps=100", "warmup_steps=0"),
    ("lora_dropout=0.1", "lora_dropout=0.0"),
    ("gradient_checkpointing=True", "gradient_checkpointing=False"),
)
CHECKPOINTED = tuple(edit for edit in EDITS if "gradient_checkpointing" not in edit[0])
RAGGED = (*EDITS, ("dataloader_drop_last=True, ", ""))
ACCUMULATED = (*EDITS, ("max_steps=5", "max_steps=3, gradient_accumulation_steps=2"))
#: Two data sets, whose batches are of one of them each, and two other pages for each question.
PAGES = EDITS[3][1]
LISTED = (*EDITS[:3], (EDITS[3][0], f"[{PAGES}, {PAGES}]"), *EDITS[4:], ("dataloader_drop_last=True, ", ""))
NEGATIVES = (
    *EDITS[:3],
    (
        "load_train_set()",
        'ColPaliEngineDataset(load_dataset("ROOT/pages", split="train"), Corpus(list(load_dataset("ROOT/pages", '
        'split="train")), doc_column_name="image"), pos_target_column_name="number", neg_target_column_name="others")',
    ),
    ("dataset import ColPaliEngineDataset", "dataset import ColPaliEngineDataset, Corpus"),
    ("import ColbertLoss, Colbert", "import ColbertNegativeCELoss as ColbertLoss, Colbert"),
    ("run_eval=True,", "run_eval=False,"),
    ('eval_strategy="steps",', ""),
    *EDITS[4:],
)
FULL = "--output-dir OUT --lr 3e-3 --tau 0.5"
COLPALI = {
    "colpali ColQwen2": Case(SCRIPT, FULL, edits=EDITS),
    "colpali ColQwen2, checkpointed": Case(SCRIPT, FULL, edits=CHECKPOINTED),
    "colpali ColQwen2, ragged": Case(SCRIPT, FULL, edits=RAGGED),
    "colpali ColQwen2, LoRA": Case(SCRIPT, f"{FULL} --peft", edits=EDITS),
    "colpali ColQwen2, pairwise": Case(SCRIPT, f"{FULL} --loss pairwise", edits=EDITS),
    "colpali ColQwen2, two data sets": Case(SCRIPT, FULL, edits=LISTED),
    "colpali ColQwen2, negatives": Case(SCRIPT, FULL, edits=NEGATIVES),
    "colpali ColQwen2, accumulated": Case(SCRIPT, FULL, edits=ACCUMULATED),
}
