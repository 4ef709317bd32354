"""Every place where another library is changed while a layout is active, and why. Nowhere else is anything patched.

Checked on the versions in `patching.CHECKED`. On others the signature decides: a replacement relies on the parameters
that it names. A target of Transformers or Accelerate that is gone or has changed stops the start, one of the other
libraries what would use it.
"""

from __future__ import annotations

from hf_parallel.hooks import entries
from hf_parallel.hooks import sentence_transformers as sentences
from hf_parallel.hooks.accelerate import accelerator, data, processes, save_state, scaler
from hf_parallel.hooks.bitsandbytes import eight_bit, four_bit
from hf_parallel.hooks.patching import Patch
from hf_parallel.hooks.peft import adapters as peft
from hf_parallel.hooks.peft import merging
from hf_parallel.hooks.peft import settings as peft_settings
from hf_parallel.hooks.trainer import checkpoints, losses, means, plain_resume, resuming
from hf_parallel.hooks.trainer import training as trainer
from hf_parallel.hooks.transformers import from_pretrained, loading, parts
from hf_parallel.hooks.trl import online
from hf_parallel.hooks.trl import trainers as trl

_MODEL = "transformers.modeling_utils"
_LOADING = "transformers.core_model_loading"
_TRAINER = "transformers.trainer:Trainer"
_ACCELERATOR = "accelerate.accelerator:Accelerator"
_OPERATIONS = "accelerate.utils.operations"
_STATE = "accelerate.state:PartialState"
_ARGUMENTS = "transformers.training_args:TrainingArguments"
_TUNER = "peft.tuners.tuners_utils:BaseTuner"
_PEFT = "peft.peft_model:PeftModel"
_TRL = "trl.trainer"
_SENTENCES = "sentence_transformers"
_DTENSOR = "torch.distributed.tensor:DTensor"
_DRAWS = ("normal_", "uniform_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "geometric_", "random_")


def all_patches() -> list[Patch]:
    """The whole list, in the order in which it is applied."""
    return [
        # Loading: each rank reads its slices between meta-init and weight loading.
        Patch(f"{_MODEL}:PreTrainedModel.from_pretrained", from_pretrained.from_pretrained, "asks for the layout"),
        Patch(
            f"{_MODEL}:PreTrainedModel.prepare_distribute_model", from_pretrained.prepare, "knows only its own meshes"
        ),
        Patch(f"{_MODEL}:PreTrainedModel.maybe_distribute_model", from_pretrained.distribute, "cuts the meta model"),
        Patch(f"{_MODEL}:safe_open", loading.open_by_reading, "a file mapping keeps whole tensors in memory"),
        Patch(f"{_LOADING}:spawn_materialize", loading.materialize, "converts slices, which mixes up joined tensors"),
        Patch(f"{_LOADING}:set_param_for_module", loading.set_parameter, "judges sizes by local shapes"),
        Patch(
            f"{_MODEL}:PreTrainedModel._initialize_missing_keys", loading.initialize_missing, "stages would draw alike"
        ),
        Patch(f"{_MODEL}:PreTrainedModel._initialize_weights", loading.initialize, "new heads equal on all ranks"),
        Patch(f"{_MODEL}:log_state_dict_report", loading.report, "knows the keys of one stage"),
        # Data: a "process" that data is counted over is a data rank.
        *(
            Patch(f"accelerate.state:{state}.{name}", make, "counts all processes", adds=True)
            for state in ("PartialState", "AcceleratorState")
            for name, make in (("num_processes", processes.num_processes), ("process_index", processes.process_index))
        ),
        Patch(f"{_STATE}.is_main_process", processes.is_main, "is one of all, not one of each data rank 0"),
        Patch(f"{_STATE}.is_last_process", processes.is_last, "is one of all, not one of each last data rank"),
        Patch(f"{_ACCELERATOR}.is_last_process", processes.is_last, "is one of all, not one of each last data rank"),
        Patch(f"{_STATE}.use_distributed", processes.several, "one data rank may be several processes"),
        Patch(f"{_STATE}.on_process", processes.on_process, "runs on all ranks of that index"),
        Patch("accelerate.accelerator:PROFILE_PATTERN_NAME", processes.name_by_rank, "one file for several ranks"),
        Patch(f"{_ARGUMENTS}.should_save", processes.one_of_all("save_on_each_node"), "goes by data rank"),
        Patch(f"{_ARGUMENTS}.should_log", processes.one_of_all("log_on_each_node"), "goes by data rank"),
        Patch(f"{_ARGUMENTS}.main_process_first", processes.main_process_first, "one data rank may be several"),
        Patch(f"{_TRAINER}.is_world_process_zero", processes.is_world_process_zero, "goes by data rank"),
        Patch(f"{_TRAINER}.hyperparameter_search", processes.search, "draws trials on process 0"),
        Patch("accelerate.accelerator:prepare_data_loader", data.prepare_data_loader, "draws orders on each rank"),
        Patch(f"{_OPERATIONS}:_gpu_gather", data.gather, "gathers over all processes"),
        Patch(f"{_OPERATIONS}:_gpu_gather_object", data.gather_object, "gathers over all processes"),
        Patch("accelerate.accelerator:reduce", data.reduce, "reduces over all processes"),
        # Accelerator: it must neither wrap nor move what is parallel already.
        Patch("accelerate.accelerator:get_grad_scaler", scaler.get_grad_scaler, "ranks would skip steps apart"),
        Patch(f"{_ACCELERATOR}.prepare", accelerator.prepare, "models and optimizers made before become parallel"),
        Patch(f"{_ACCELERATOR}.prepare_model", accelerator.prepare_model, "would wrap in DDP"),
        Patch(f"{_OPERATIONS}:convert_to_fp32", accelerator.convert_to_fp32, "copies split logits that nobody reads"),
        Patch(f"{_ACCELERATOR}.no_sync", accelerator.no_sync, "knows DDP's and its own FSDP2"),
        Patch(f"{_ACCELERATOR}.check_trigger", accelerator.check_trigger, "asks data ranks, not those of one model"),
        Patch(f"{_ACCELERATOR}.gather_for_metrics", data.gather_for_metrics, "takes numbers per rank for rows"),
        Patch(f"{_ACCELERATOR}.clip_grad_norm_", accelerator.clip_grad_norm_, "norm of one stage or shard only"),
        Patch(f"{_ACCELERATOR}.get_state_dict", accelerator.get_state_dict, "returns shards"),
        Patch(f"{_ACCELERATOR}.save_state", save_state.save_state, "writes shards over one another"),
        Patch(f"{_ACCELERATOR}.load_state", save_state.load_state, "reads whole weights"),
        # torch: what scripts do to weights by hand.
        Patch("torch:save", parts.save, "pickles a part of the weights without a word"),
        Patch(f"{_DTENSOR}.__getitem__", parts.get_rows, "what is written to rows of a cut weight is lost"),
        Patch(f"{_DTENSOR}.__setitem__", parts.set_rows, "what is written to rows of a cut weight is lost"),
        *(Patch(f"{_DTENSOR}.{name}", parts.draw, "each rank draws for its part alone") for name in _DRAWS),
        # Trainer.
        Patch(f"{_TRAINER}.__init__", trainer.init, "models made in code become parallel; settings are checked"),
        Patch(f"{_TRAINER}.call_model_init", trainer.call_model_init, "models from model_init become parallel"),
        Patch(f"{_TRAINER}.train", resuming.train, "waits for ranks that will not come; resumes from what is damaged"),
        *(
            Patch(f"{_TRAINER}.{name}", entries.attended(f"trainer.{name}"), "waits for ranks that will not come")
            for name in ("evaluate", "predict")
        ),
        Patch(f"{_TRAINER}.get_batch_samples", trainer.get_batch_samples, "repeats rows to fill a ragged last batch"),
        Patch(f"{_TRAINER}._get_num_items_in_batch", trainer.num_items_in_batch, "share of the tokens per data rank"),
        Patch(f"{_TRAINER}.log", losses.log, "metrics of a pipelined loss are known on the last stage"),
        Patch(f"{_TRAINER}.training_step", trainer.training_step, "does not know which rows are repeated"),
        Patch(f"{_TRAINER}.floating_point_ops", trainer.floating_point_ops, "counts the local part of the model"),
        Patch(f"{_TRAINER}._defer_fsdp_gradient_reduction", trainer.defer_reduction, "reads its own config", "5.23"),
        Patch(
            f"{_TRAINER}._sync_replicated_trainable_parameters", trainer.nothing, "would average over stages", "5.19"
        ),
        # Losses: means over targets that data ranks have unlike numbers of.
        *(
            Patch(f"torch.nn.functional:{name}", means.mean_of(name), "takes the mean over this rank's targets")
            for name in means.COUNTS
        ),
        # Checkpoints.
        Patch(f"{_TRAINER}.save_model", checkpoints.save_model, "before 5.23 saves adapters on rank 0 alone"),
        Patch(f"{_TRAINER}._save", checkpoints.save, "a plain module's shards are not a checkpoint"),
        Patch(f"{_TRAINER}._save_checkpoint", checkpoints.save_checkpoint, "writes where a crash leaves half of it"),
        Patch(f"{_TRAINER}._finalize_training", checkpoints.finalize_training, "counts saves that go on"),
        Patch(f"{_TRAINER}._save_optimizer_and_scheduler", checkpoints.save_optimizer, "optimizer state is sharded"),
        Patch(f"{_TRAINER}._save_rng_state", checkpoints.save_rng_state, "ranks of one data rank write one file"),
        Patch(f"{_TRAINER}._init_training_state", resuming.init_training_state, "repeats rows of a stream that ended"),
        Patch(f"{_TRAINER}._load_from_checkpoint", resuming.load_from_checkpoint, "reads whole weights"),
        Patch(f"{_TRAINER}._load_optimizer_and_scheduler", resuming.load_optimizer, "optimizer state is sharded"),
        Patch(f"{_TRAINER}._load_rng_state", resuming.load_rng_state, "looks for a file per data rank"),
        Patch(f"{_TRAINER}._load_best_model", resuming.load_best_model, "reads whole weights"),
        Patch("transformers.trainer:LengthGroupedSampler", data.length_grouped_sampler, "groups by process"),
        Patch(
            "accelerate.data_loader:skip_first_batches",
            data.skip_first_batches,
            "forgets shares, the remainder, the order",
            copies=True,
        ),
        # bitsandbytes, when a script imports it.
        Patch("bitsandbytes.optim.optimizer:Optimizer8bit.step", eight_bit.step, "kernels take no DTensor"),
        # PEFT, where it is installed: adapters come after the base has become parallel.
        Patch(f"{_TUNER}.inject_adapter", peft.inject_adapter, "sees one stage, and draws random numbers for it only"),
        Patch(f"{_TUNER}._cast_adapter_dtype", peft.cast_adapter_dtype, "leaves adapters whole on every rank"),
        Patch("peft.tuners.lora.layer:LoraLayer.pissa_init", peft.start_from_base, "factorises shards"),
        Patch("peft.tuners.lora.layer:LoraLayer.olora_init", peft.start_from_base, "factorises shards"),
        Patch(
            "peft.utils.other:prepare_model_for_kbit_training",
            four_bit.prepare_for_training,
            "casts shards",
            copies=True,
        ),
        Patch("peft.tuners.lora.dora:DoraLinearLayer.update_layer", peft.first_magnitudes, "reads norms off shards"),
        Patch("peft.utils.other:ModulesToSaveWrapper.update", peft.copy_module, "copies process groups and shards"),
        Patch("peft.tuners.lora.layer:LoraLayer._get_in_out_features", peft.in_out_features, "reads sizes off shards"),
        Patch(f"{_TUNER}.merge_adapter", merging.merge, "changes gathered weights"),
        Patch(f"{_TUNER}.unmerge_adapter", merging.merge, "changes gathered weights"),
        *(
            Patch(
                f"peft.tuners.lora.layer:{kind}.get_delta_weight", merging.delta_weight, "adds whole to local weights"
            )
            for kind in ("Linear", "Embedding", "ParamWrapper")
        ),
        Patch("peft.tuners.lora.layer:Linear.merge", merging.merge_layer, "takes norms of a shard's rows for DoRA"),
        Patch("peft.tuners.lora.layer:Linear.unmerge", merging.merge_layer, "scales a shard's rows by DoRA's norms"),
        Patch(f"{_TUNER}._unload_and_optionally_merge", merging.unload, "leaves split layers without a way out"),
        Patch(
            f"{_TUNER}.delete_adapter",
            peft_settings.refuse_deleting,
            "FSDP2 would keep what is deleted",
        ),
        Patch(f"{_PEFT}.add_adapter", peft.add_adapter, "prompt learning changes the rows that stages expect"),
        Patch(f"{_PEFT}.get_nb_trainable_parameters", peft.count, "counts those of one stage"),
        Patch(f"{_PEFT}.save_pretrained", peft.save_pretrained, "writes shards of one stage"),
        Patch(
            "peft.utils.save_and_load:_reshard_dtensor_values_for_load", peft.reshard_for_load, "cuts in another order"
        ),
        # TRL, when a script imports it.
        Patch(
            f"{_TRL}.sft_trainer:DataCollatorForLanguageModeling.torch_call",
            trl.torch_call,
            "joins examples to one row, which stages cannot cut and whose repeats cannot be told",
        ),
        Patch(f"{_TRL}.utils:DTensor", trl.no_tensor, "gathers a split head", "1.9"),
        Patch(f"{_TRL}.utils:_ChunkedLogProbFunction", trl.chunked_log_probs, "multiplies by a whole head", "1.8"),
        *(
            Patch(f"{_TRL}.{kind}_trainer:get_peft_model", trl.get_peft_model, "casts shards", since)
            for kind, since in _ADAPTED.items()
        ),
        Patch(f"{_TRL}.utils:hash_module", trl.hash_module, "cannot read shards", "0.29", copies=True),
        Patch(
            f"{_TRL}.dpo_trainer:DPOTrainer.compute_ref_log_probs",
            trl.reference_log_probs,
            "asks one stage",
        ),
        Patch(
            f"{_TRL}.kto_trainer:KTOTrainer.compute_ref_log_probs",
            trl.reference_log_probs,
            "asks one stage",
        ),
        Patch(f"{_TRL}.kto_trainer:KTOTrainer._prepare_dataset", trl.prepare_dataset, "pairs per process"),
        Patch(f"{_TRL}.kto_trainer:KTOTrainer._compute_kl_logps", trl.kl_logps, "mean of means"),
        Patch(f"{_TRL}.reward_trainer:RewardTrainer.compute_loss", trl.reward_metrics, "mean of means"),
        Patch(f"{_TRL}.utils:shuffle_sequence_dict", online.shuffle_sequence_dict, "shuffles by process", copies=True),
        Patch(f"{_TRL}.utils:split_tensor_dict", online.split_tensor_dict, "splits by process", copies=True),
        *(patch for kind in ("GRPO", "RLOO") for patch in _generating(kind)),
        # sentence-transformers, when a script imports it.
        Patch(f"{_SENTENCES}.base.trainer:distributed_evaluation", sentences.distributed_evaluation, "splits by rank"),
        Patch(f"{_SENTENCES}.base.trainer:BaseTrainer.prepare_loss", sentences.prepare_loss, "may hold own weights"),
        Patch(f"{_SENTENCES}.base.trainer:BaseTrainer._save", sentences.save, "expects to run on one rank"),
        Patch(
            f"{_SENTENCES}.base.trainer:BaseTrainer._load_from_checkpoint",
            sentences.load_from_checkpoint,
            "makes another model of the sharded one's class",
        ),
        Patch(
            f"{_SENTENCES}.base.training_args:BaseTrainingArguments.__post_init__",
            sentences.keep_last_batch,
            "drops the last batch where ranks of one model read it together",
        ),
        Patch(f"{_SENTENCES}.util.distributed:all_gather", sentences.all_gather, "gathers over all processes"),
        *(
            Patch(f"{_SENTENCES}.{place}:get_rank", sentences.data_rank, "finds its rows by process")
            for place in ("util.distributed", "util", *_CONTRASTIVE)
        ),
    ]


#: TRL's trainers that make adapters, and since when under this name.
_ADAPTED = {"sft": "0.26", "dpo": "0.29", "kto": None, "reward": "0.26", "grpo": None, "rloo": None}
_CONTRASTIVE = (
    "sentence_transformer.losses.multiple_negatives_ranking",
    "sentence_transformer.losses.cached_multiple_negatives_ranking",
    "sentence_transformer.losses.gist_embed",
    "sentence_transformer.losses.cached_gist_embed",
    "multi_vector_encoder.losses.multiple_negatives_ranking",
    "multi_vector_encoder.losses.cached_multiple_negatives_ranking",
)


def _generating(kind: str) -> list[Patch]:
    module = f"{_TRL}.{kind.lower()}_trainer"
    trainer = f"{module}:{kind}Trainer"
    return [
        Patch(f"{module}:set_seed", online.set_seed, "a seed per process"),
        Patch(f"{module}:pad", online.pad, "pads by process"),
        Patch(
            f"{trainer}._generate_and_score_completions",
            online.generate_and_score,
            "takes rows by process, repeated ones too",
        ),
        Patch(f"{trainer}._generate", online.generate, "counts repeated rows"),
        Patch(f"{trainer}._calculate_rewards", online.calculate_rewards, "asks on every process"),
        Patch(f"{trainer}._compute_loss", online.compute_loss, "mean of means"),
    ]


def patches_without_layout() -> list[Patch]:
    """All that changes where no layout is active: plain Trainer resumes from the checkpoints of layouts."""
    return [
        Patch(f"{_TRAINER}.train", plain_resume.train, "reads what is damaged"),
        Patch(f"{_TRAINER}._load_from_checkpoint", plain_resume.load_from_checkpoint, "converts no names of the Hub"),
        Patch(f"{_TRAINER}._load_optimizer_and_scheduler", plain_resume.load_optimizer, "knows optimizer.pt only"),
        Patch(f"{_ACCELERATOR}.load_state", save_state.load_state_without_layout, "knows optimizer.bin only"),
    ]
