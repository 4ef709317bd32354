"""Three lines of Python instead of a command: `python integrations/ray/train.py` on any node of a Ray cluster."""

from hf_parallel.cli.ray_launcher import trainer

arguments = "--output_dir /shared/out --max_steps 40 --per_device_train_batch_size 8 --save_steps 10 --report_to none"
trainer(
    "examples/train_language_model.py", arguments.split(), parallel="tp=2,dp_shard=-1", num_processes=8, max_restarts=3
).fit()
