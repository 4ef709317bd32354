"""Trainers of papers on preferences and rewards, each read from a checkout: ORPO, SPIN, Bradley-Terry, MedicalGPT."""

from tests.outside.cases import TRAINER, Case

#: What Trainer hands on today, and what its arguments are called.
LOSS = ("return_outputs=False):", "return_outputs=False, num_items_in_batch=None):")
SMALL = "warmup_steps=0, adam_epsilon=1e-3, use_cpu=True, disable_tqdm=True, max_steps=3"
RENAMED = (("evaluation_strategy=", "eval_strategy="), ("torch_dtype=torch.bfloat16", "dtype=torch.float32"))
MOCK = "__import__('tests.outside.stand_ins').outside.stand_ins.stand_for(%s)\n"
ORPO = (
    ("import wandb\n", "import sys\nsys.path.insert(0, 'SOURCES/orpo')\n" + MOCK % "'wandb'" + "import wandb\n"),
    *RENAMED,
    (
        "load_dataset(self.args.data_name, cache",
        "load_dataset(self.args.data_name).rename_column('prompt', 'question')#",
    ),
    ("logging_dir=self.log_dir,", f"{SMALL},"),
    ("logging_steps=50", "logging_steps=1"),
    ("warmup_steps=self.args.warmup_steps,", ""),
    ("overwrite_output_dir=True,", ""),
    ("report_to='wandb'", "report_to='none'"),
    ("bf16=True,", ""),
    ("time.gmtime()", "time.gmtime(0)"),  # in the name of a folder
    ("'./checkpoints/'", "'OUT'"),
    ("num_proc=self.args.num_proc", "num_proc=None"),  # a worker would be sent the method's object, model included
    ("return_tensors='pt').size(-1)", "return_tensors='pt', return_dict=False).size(-1)"),
    ("item.run()", "item.run(); item.trainer.save_model('OUT')"),
    ("self.tokenizer.pad_token_id = self.tokenizer.eos_token_id", "pass"),
)
ORPO_MODULES = (
    (
        "orpo/src/orpo_trainer.py",
        (
            LOSS,
            (".to(dtype=torch.bfloat16)\n        \n        wandb", "\n        \n        wandb"),
            ("torch.bfloat16", "torch.float32"),
        ),
    ),
)
ORPO_RUN = (
    "--model_name ROOT/wide --data_name ROOT/preferences --per_device_train_batch_size ROWS --lr 1e-2 --num_proc 1 "
    "--per_device_eval_batch_size ROWS --optim adamw_torch --prompt_max_length 60 --response_max_length 57"
)
ALIGNING = {
    "ORPO main.py": Case("orpo/main.py", ORPO_RUN, edits=ORPO, modules=ORPO_MODULES),
    "ORPO main.py, accumulated, without prompts": Case(
        "orpo/main.py",
        f"{ORPO_RUN} --gradient_accumulation_steps 2 --disable_prompt_loss",
        edits=ORPO,
        modules=ORPO_MODULES,
    ),
    "ORPO main.py, LoRA": Case(
        "orpo/main.py",
        f"{ORPO_RUN} --enable_lora --lora_rank 4 --lora_dropout 0",
        edits=ORPO,
        modules=ORPO_MODULES,
    ),
}
#: Reward models of RLHFlow. Its chats are lists of messages.
TURNS = "[{'role': 'user', 'content': sample['prompt']}, {'role': 'assistant', 'content': sample['%s']}]"
REWARDS = (
    LOSS,
    *RENAMED,
    *((f"            sample['{side}'], tok", f"            {TURNS % side}, tok") for side in ("chosen", "rejected")),
    ("num_proc=8", "num_proc=1"),
    ("range(500)", "range(11)"),
    ("use_flash_attention_2=True", "attn_implementation='sdpa'"),
    ("    local_rank=script_args.local_rank,\n", ""),
    ("logging_steps=10", "logging_steps=1"),
    ("warmup_ratio=0.03", SMALL),
    ("report_to='wandb'", "report_to='none'"),
    ("script_args.eval_set_path", "script_args.train_set_path"),
    ("tokenizer_name, use_fast = False", "tokenizer_name"),
)
ORM = (
    LOSS,
    (
        "question = sample['conversations'][0]['content'].split(\"Step 1\")[0]",
        "question, sample['conversations'] = sample['prompt'], [0, {'content': '+-'[len(sample['chosen']) % 2]}]",
    ),
    (
        "ans = \"Step 1\" + sample['conversations'][0]['content'].split(\"Step 1\")[1]",
        "ans = sample['chosen']",
    ),
    ("        return sample\n", "        del sample['conversations']\n        return sample\n"),
    ("dtype=torch.bfloat16)", "dtype=torch.float32)"),
    ('output_name + "/last_checkpoint"', "'OUT'"),
)
REWARD_RUN = (
    "--model_name ROOT/chatty --train_set_path ROOT/preferences --output_path OUT --per_device_train_batch_size ROWS "
    "--per_device_eval_batch_size ROWS --learning_rate 1e-2 --optim adamw_torch --bf16 False --eval_every_steps 2 "
    "--save_every_steps 2 --max_length 33"
)
for name, more in {
    "": "--gradient_accumulation_steps 1 --gradient_checkpointing False",
    ", accumulated": "--gradient_accumulation_steps 2",
}.items():
    ALIGNING[f"RLHFlow llama3_8B_rm.py{name}"] = Case(
        "RLHF-Reward-Modeling/bradley-terry-rm/llama3_8B_rm.py", f"{REWARD_RUN} {more}", edits=REWARDS
    )
    ALIGNING[f"RLHFlow scalar_orm_train.py{name}"] = Case(
        "RLHF-Reward-Modeling/math-rm/scalar_orm_train.py", f"{REWARD_RUN} {more}", edits=(*REWARDS, *ORM)
    )
#: What MedicalGPT imports for its log, its package, its shuffles, and precision written into it.
MEDICAL = (
    ("from loguru import logger\n", "import sys\n" + MOCK % "'loguru'" + "from loguru import logger\n"),
    ("sys.path.append(", "sys.path.insert(0, 'SOURCES/MedicalGPT'); ("),
)
PAIRED = (
    *MEDICAL,
    (
        'logger.info(f"Raw datasets: {raw_datasets}")',
        "raw_datasets = raw_datasets.map(lambda row: {'conversations': [{'from': 'human', 'value': row['prompt']}]})",
    ),
    (".shuffle()", ".shuffle(seed=1)"),
)
REWARD = (*PAIRED, *((f"            load_in_{bits}bit=model_args.load_in_{bits}bit,\n", "") for bits in (4, 8)))
MEDICAL_RUN = f"--model_name_or_path ROOT/chatty --do_train --do_eval {TRAINER} --max_steps 3 --torch_dtype float32"
FULL, ADAPTED = "--use_peft False", "--use_peft True --lora_rank 4 --lora_dropout 0"
PAIRS_RUN = (
    "--model_name_or_path ROOT/chatty --do_train --do_eval --output_dir OUT --per_device_train_batch_size ROWS "
    "--per_device_eval_batch_size ROWS --report_to none --max_steps 3 --torch_dtype float32 --fp16 False --bf16 False "
    "--learning_rate 1e-2 --warmup_steps 0 --eval_steps 2 --save_steps 2 --train_file_dir ROOT/preferences "
    "--validation_file_dir ROOT/preferences --max_source_length 100 --max_target_length 100 --gradient_checkpointing "
    "False --target_modules q_proj,down_proj"
)
for kind, more in {"full": FULL, "LoRA": ADAPTED}.items():
    ALIGNING[f"MedicalGPT supervised_finetuning.py, {kind}"] = Case(
        "MedicalGPT/training/supervised_finetuning.py",
        f"{MEDICAL_RUN} --train_file_dir ROOT/talks --validation_file_dir ROOT/talks --model_max_length 61 {more} "
        "--gradient_accumulation_steps 2 --save_strategy steps --save_steps 2",
        edits=MEDICAL,
    )
    ALIGNING[f"MedicalGPT pretraining.py, {kind}"] = Case(
        "MedicalGPT/training/pretraining.py",
        f"{MEDICAL_RUN} --train_file_dir ROOT/plain --validation_file_dir ROOT/plain --block_size 33 --packing True "
        f"{more} --max_eval_samples 11 --gradient_checkpointing True",
        edits=MEDICAL,
    )
    ALIGNING[f"MedicalGPT reward_modeling.py, {kind}"] = Case(
        "MedicalGPT/training/reward_modeling.py",
        f"{MEDICAL_RUN} --train_file_dir ROOT/preferences --validation_file_dir ROOT/preferences "
        f"--max_source_length 40 --max_target_length 20 --remove_unused_columns False {more}",
        edits=REWARD,
    )
    ALIGNING[f"MedicalGPT dpo_training.py, {kind}"] = Case(
        "MedicalGPT/training/dpo_training.py",
        f"{PAIRS_RUN} --gradient_accumulation_steps {1 + (kind == 'full')} {more}",
        edits=(
            *PAIRED,
            (
                "optim=args.optim,",
                f"optim=args.optim, {SMALL.replace('warmup_steps=0, ', '').replace(', max_steps=3', '')},",
            ),
        ),
    )
#: A board that is not here, seeds by process, and arguments that Transformers has no more.
SUMMARIES = (
    ("from torch.utils.tensorboard import SummaryWriter\n", "from unittest.mock import MagicMock as SummaryWriter\n"),
    (
        'writer = SummaryWriter(f"runs/{args.run_name}")',
        'os.makedirs(f"runs/{args.run_name}"); writer = SummaryWriter()',
    ),
    ("            safe_serialization=False,\n", "            \n"),
    ("                safe_serialization=False,\n", "                \n"),
    ("dataset.shuffle(seed=local_seed)", "dataset.shuffle(seed=args.seed)"),
    ("accelerator.backward(loss)", "loss = loss.mean()\n                accelerator.backward(loss)"),
    ('"EleutherAI/pythia-160m"', '"ROOT/wide"'),
    ("=128,", "=5,"),
    ('"rouge2"', '"rouge1"'),
)
#: Configurations of models of its own, and gathers of numbers that have no dimension.
SCALARS = (
    ("        base_config: PretrainedConfig = AutoConfig", "        base_config=AutoConfig"),
    ("config=self.config.base_config", "config=AutoConfig.from_pretrained(config.base_model)"),
    ("        self.base_config = base_config\n", ""),
    ("    def forward(self, **kwargs):", "        self.post_init()\n\n    def forward(self, **kwargs):"),
)
SUMMARY_RUN = (
    "--base_model ROOT/wide --query_dataset ROOT/token-summaries --gradient_accumulation_steps 2 --lr 1e-2 --eps 1e-3 "
    "--local_micro_batch_size ROWS --local_eval_batch_size ROWS --output_dir OUT/model --num_train_epochs 2 --run_eval"
)
COMPARED_RUN = f"{SUMMARY_RUN} --label_dataset ROOT/token-summaries --sft_model_path ROOT/wide --total_episodes 32"
DETAILS = "summarize_from_feedback_details/summarize_from_feedback_details"
for script, given, edits in (
    ("sft.py", f"{SUMMARY_RUN} --response_length 5", SUMMARIES),
    ("reward.py", COMPARED_RUN, (*SUMMARIES, *SCALARS)),
    ("dpo.py", f"{COMPARED_RUN} --response_length 5", SUMMARIES),
):
    ALIGNING[f"summarize_from_feedback_details {script}"] = Case(f"{DETAILS}/{script}", given, edits=edits)
#: SPIN stands on alignment-handbook and TRL of 2023.
SPIN = (
    ("import logging\nimport sys\n", "import logging\nimport sys\nsys.path.insert(0, 'SOURCES/SPIN/spin')\n"),
    ("use_flash_attention_2=model_args.use_flash_attention_2,", ""),
    ("        torch_dtype=torch_dtype,\n", "        dtype=torch.float32,\n"),
    ("    raw_datasets = get_datasets(data_args, splits=data_args.dataset_splits)", "    raw_datasets = talks()"),
    (
        "def main():\n",
        "def talks():\n    from datasets import load_dataset\n    def turns(row, side):\n        first = {'role': "
        "'user', "
        "'content': row['prompt']}\n        return [first, {'role': 'assistant', 'content': row[side]}]\n    return "
        "load_dataset('ROOT/preferences').map(lambda row: {'real': turns(row, 'chosen'), 'generated': turns(row, "
        "'rejected')}, remove_columns=['prompt', 'chosen', 'rejected', 'reference'])\n\n\ndef main():\n",
    ),
    ('            "dataset": list(data_args.dataset_mixer.keys()),\n', ""),
    ('            "dataset_tags": list(data_args.dataset_mixer.keys()),\n', ""),
    ("spin_trainer.create_model_card(**kwargs)", "pass"),
)
SPIN_MODULES = (
    (
        "spin/alignment/trainer.py",
        (
            (
                "        return_outputs=False,\n    ) ->",
                "        return_outputs=False,\n        num_items_in_batch=None,\n    ) ->",
            ),
            (
                "from trl.import_utils import is_peft_available, is_wandb_available\n",
                "is_peft_available = lambda: True\nis_wandb_available = lambda: False\n",
            ),
            (
                "from trl.models import PreTrainedModelWrapper, create_reference_model\n",
                "PreTrainedModelWrapper = create_reference_model = None\n",
            ),
            (
                "disable_dropout_in_model, pad_to_length",
                "disable_dropout_in_model\nfrom trl.experimental.utils import pad_to_length",
            ),
            (
                "            tokenizer=tokenizer,\n            model_init",
                "            processing_class=tokenizer,\n            model_init",
            ),
            (
                "        if self.accelerator.is_main_process:\n            self.store",
                "        if False:\n            self.store",
            ),
            ("get_batch_samples", "get_policy_samples"),
            ("def log(self, logs: Dict[str, float])", "def log(self, logs: Dict[str, float], *more)"),
            ("return super().log(logs)", "return super().log(logs, *more)"),
        ),
    ),
)
for kind, more in {
    "": "",
    ", accumulated": "--gradient_accumulation_steps 2",
    ", LoRA": "--use_peft true --lora_r 4 --lora_dropout 0 --lora_target_modules q_proj down_proj",
}.items():
    ALIGNING[f"SPIN run_spin.py{kind}"] = Case(
        "SPIN/spin/run_spin.py",
        f"--model_name_or_path ROOT/chatty --max_length 49 --max_prompt_length 23 --optim adamw_torch {TRAINER} "
        f"--max_steps 3 --eval_strategy epoch --preprocessing_num_workers 1 {more}",
        edits=SPIN,
        modules=SPIN_MODULES,
    )
#: DistillKit reads a file of settings, which stands in its copy here.
KL = {"function": "kl", "weight": 0.5, "temperature": 2.0, "missing_probability_handling": "zero"}
DISTILLED = {
    "": {"loss_functions": [{"function": "cross_entropy", "weight": 0.5}, KL]},
    ", sparse": {
        "loss_functions": [KL, {**KL, "function": "tvd", "weight": 0.3}],
        "teacher": {"kind": "hf", "path": "ROOT/chatty", "top_k": 7},
        "training_args": {"gradient_accumulation_steps": 2},
    },
    ", hidden states": {
        "loss_functions": [KL, {"function": "hs_mse", "weight": 0.5}],
        "layer_mapping": [[0, 0], [2, 1], [5, 3]],
    },
}
for kind, settings in DISTILLED.items():
    training = {
        "max_steps": 3,
        "per_device_train_batch_size": "ROWS",
        "per_device_eval_batch_size": "ROWS",
        "learning_rate": 1e-2,
        "adam_epsilon": 1e-3,
        "logging_steps": 1,
        "report_to": "none",
        "bf16": False,
        "use_cpu": True,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "eval_strategy": "epoch",
        **settings.get("training_args", {}),
    }
    repository = {"repo_id": "ROOT/texts", "split": "train"}
    asked = {
        "model": "ROOT/llama",
        "dataset": {"train_dataset": repository, "eval_dataset": {**repository, "split": "validation"}},
        "teacher": {"kind": "hf", "path": "ROOT/chatty"},
        "sequence_length": 33,
        "output_path": "OUT",
        "use_flash_attention": False,
        **settings,
        "training_args": training,
    }
    text = repr(asked).replace("'ROWS'", "ROWS")
    ALIGNING[f"DistillKit{kind}"] = Case(
        "DistillKit/distillkit/main.py",
        "SOURCES/DistillKit/examples/mistral3.yaml",
        edits=(
            ("import hashlib\n", "import sys\nsys.path.insert(0, 'SOURCES/DistillKit')\nimport hashlib\n"),
            ("config_dict = yaml.safe_load(f)", f"config_dict = {text}"),
            ("    main()", "    main(standalone_mode=False)"),
        ),
        modules=(("distillkit/trainer.py", (("        self.log(\n", "        dict(  # logs of a process\n"),)),),
    )
