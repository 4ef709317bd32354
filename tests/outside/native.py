"""accelerate's examples of layouts by `ParallelismConfig`; with its sizes of 1 `--parallel` gives the only layout."""

from tests.outside.cases import Case

FOLDER = "accelerate/examples/torch_native_parallelism"
#: Its data set, its tracker, and bf16, which rounds; a batch of all rows.
DATA = (
    (
        "torch_native_parallelism/utils.py",
        (
            (
                'load_dataset("roneneldan/TinyStories", split="train[:50%]")',
                'load_dataset("ROOT/texts", split="train")',
            ),
        ),
    ),
)
LOOP = (
    ('log_with=["wandb"], mixed_precision="bf16", ', ""),
    ('    accelerator.init_trackers("nd_parallel_training")\n', ""),
    ("torch_dtype=torch.bfloat16", "dtype=torch.float32"),
    ("lr=1e-5", "lr=1e-1"),
    ("DataLoader(dataset, batch_size=1", "DataLoader(dataset.select(range(16)), batch_size=ROWS"),
    ("dist.all_reduce(loss", "dist.is_initialized() and dist.all_reduce(loss"),
    ('args.save_dir + f"/{args.model_name}"', "args.save_dir"),
)
TRAINER = (
    ("bf16=True", "use_cpu=True, disable_tqdm=True, report_to='none', max_steps=3, adam_epsilon=1e-3"),
    ("learning_rate=5e-5", "learning_rate=1e-2"),
    ("logging_steps=5", "logging_steps=1"),
    ("per_device_train_batch_size=1", "per_device_train_batch_size=ROWS"),
)
RUN = "--model-name ROOT/llama --sequence-length 33 --save-dir OUT"
NATIVE = {
    "nd_parallel": Case(f"{FOLDER}/nd_parallel.py", RUN, edits=LOOP, modules=DATA),
    "nd_parallel_trainer": Case(
        f"{FOLDER}/nd_parallel_trainer.py", f"{RUN} --device-type cpu", edits=TRAINER, modules=DATA
    ),
}
