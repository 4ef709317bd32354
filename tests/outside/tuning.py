"""Well-known scripts that tune one language model, each read from a checkout of its repository."""

from tests.outside.cases import TRAINER, Case

#: Names that Transformers and PEFT have under another name now, and numbers for three steps in float32.
ALPACA_LORA = (
    (
        "import os\nimport sys\n",
        "import os\nimport sys\nsys.path.insert(0, 'SOURCES/alpaca-lora')\nos.chdir(sys.path[0])\n",
    ),
    (
        "    prepare_model_for_int8_training,\n",
        "    prepare_model_for_kbit_training as prepare_model_for_int8_training,\n",
    ),
    ("        load_in_8bit=True,\n        torch_dtype=torch.float16,\n", "        dtype=torch.float32,\n"),
    ("device_map=device_map", "device_map=None"),
    ("LlamaTokenizer.from_pretrained", "transformers.AutoTokenizer.from_pretrained"),
    ("warmup_steps=100", "warmup_steps=0, use_cpu=True, disable_tqdm=True, adam_epsilon=1e-3, max_steps=3"),
    ("fp16=True,", ""),
    ("logging_steps=10,", "logging_steps=1,"),
    ("evaluation_strategy", "eval_strategy"),
    ("=200 if", "=2 if"),
    ("save_steps=200", "save_steps=2"),
    (
        "group_by_length=group_by_length",
        "train_sampling_strategy='group_by_length' if group_by_length else 'random'",
    ),
    ('"wandb" if use_wandb else None', '"none"'),
    ("        model = torch.compile(model)\n", "        pass\n"),
    (".shuffle()", ".shuffle(seed=1)"),
    # Processes that share a batch are not counted (docs/idioms.md).
    ('int(os.environ.get("WORLD_SIZE", 1))', '__import__("accelerate").PartialState().num_processes'),
)
TUNING = {
    f"alpaca-lora finetune.py{name}": Case(
        "alpaca-lora/finetune.py",
        "--base_model ROOT/llama --data_path ROOT/instructions/train.json --output_dir OUT --batch_size 16 "
        f"--micro_batch_size ROWS --learning_rate 1e-2 --cutoff_len 65 --val_set_size 5 --lora_dropout 0 {more}",
        edits=ALPACA_LORA,
    )
    for name, more in {"": "", ", lengths": "--group_by_length True --train_on_inputs False"}.items()
}
