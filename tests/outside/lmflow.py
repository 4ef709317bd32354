"""LMFlow's finetuner, with layers that train in turn and optimizers of its own, read from a checkout."""

from tests.outside.cases import TRAINER, Case

SCRIPT = "LMFlow/examples/finetune.py"
EDITS = (
    ("sys.path.remove(os.path.abspath(os.path.dirname(sys.argv[0])))", "sys.path.insert(0, 'SOURCES/LMFlow/src')"),
    (
        "from transformers import HfArgumentParser\n",
        "from transformers import HfArgumentParser\n"
        "__import__('tests.outside.stand_ins').outside.stand_ins.stand_for('wandb')\n",
    ),
)
RUN = (
    f"--model_name_or_path ROOT/llama --dataset_path ROOT/typed --block_size 33 --torch_dtype float32 {TRAINER} "
    "--do_train --do_eval --eval_dataset_path ROOT/typed --eval_strategy steps --eval_steps 2 --max_steps 4"
)
OPTIMIZERS = (
    *("dummy", "adabelief", "adabound", "lars", "lamb", "adamax", "nadam", "radam", "adagrad", "adadelta", "adam"),
    *("adamw_schedule_free", "sgd_schedule_free", "adamp", "sgdp", "yogi", "sophia", "adan", "novograd", "muon"),
)
LMFLOW = {
    "LMFlow finetune": Case(SCRIPT, RUN, edits=EDITS),
    "LMFlow finetune, LoRA": Case(
        SCRIPT, f"{RUN} --use_lora True --lora_dropout 0 --lora_r 4 --save_aggregated_lora False", edits=EDITS
    ),
    "LMFlow finetune, LISA": Case(
        SCRIPT, f"{RUN} --use_lisa True --lisa_activated_layers 2 --lisa_interval_steps 2", edits=EDITS
    ),
    **{
        f"LMFlow finetune, {name}": Case(
            SCRIPT, f"{RUN} --use_customized_optim True --customized_optim {name}", edits=EDITS
        )
        for name in OPTIMIZERS
    },
}
