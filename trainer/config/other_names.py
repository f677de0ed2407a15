"""What other trainers call our options, so that a key from their scripts is answered with ours.

The names are those that users of TRL, verl, EasyR1 and OpenRLHF write; none of them is read by this code.
"""

from __future__ import annotations

OPTIONS = {
    "rollout.samples_per_prompt": "n num_generations n_samples_per_prompt group_size samples",
    "rollout.prompts_per_step": "rollout_batch_size train_batch_size batch_size generation_batch_size",
    "rollout.max_tokens": "max_completion_length max_response_length max_new_tokens response_length"
    " generate_max_len max_tokens",
    "rollout.temperature": "temperature",
    "rollout.tensor_parallel": "tensor_model_parallel_size vllm_tensor_parallel_size tensor_parallel_size tp",
    "rollout.gpu_memory_utilization": "vllm_gpu_memory_utilization gpu_memory_utilization",
    "rollout.eager": "enforce_eager",
    "rollout.sleep_level": "vllm_enable_sleep vllm_enable_sleep_mode free_cache_engine",
    "rollout.prefix_caching": "enable_prefix_caching",
    "rollout.staleness": "staleness_threshold max_async_level async_level",
    "optimizer.learning_rate": "lr learning_rate actor_learning_rate",
    "optimizer.warmup_steps": "warmup_steps lr_warmup_steps num_warmup_steps",
    "optimizer.warmup_ratio": "warmup_ratio lr_warmup_ratio lr_warmup_steps_ratio",
    "optimizer.schedule": "lr_scheduler_type lr_scheduler warmup_style",
    "optimizer.weight_decay": "weight_decay l2",
    "optimizer.max_grad_norm": "max_grad_norm grad_clip max_norm clip_grad",
    "optimizer.betas": "adam_betas adam_beta1 adam_beta2",
    "optimizer.eps": "adam_epsilon adam_eps",
    "optimizer.zero_stage": "zero_stage stage",
    "optimizer.offload_optimizer": "optimizer_offload adam_offload offload_optimizer cpu_offload",
    "optimizer.offload_reference": "offload_reference ref_reward_offload",
    "algorithm.kl_coef": "beta kl kl_coef kl_loss_coef init_kl_coef",
    "algorithm.kl_estimator": "kl_loss_type kl_penalty kl_estimator",
    "algorithm.kl_in": "use_kl_loss use_kl_in_reward",
    "algorithm.clip_low": "epsilon clip_ratio clip_ratio_low eps_clip clip_range",
    "algorithm.clip_high": "epsilon_high clip_ratio_high",
    "algorithm.dual_clip": "clip_ratio_c clip_ratio_dual delta",
    "algorithm.advantage": "adv_estimator advantage_estimator scale_rewards",
    "algorithm.surrogate": "policy_loss loss_mode importance_sampling_level",
    "algorithm.loss_denominator": "loss_agg_mode loss_type loss_avg_mode",
    "algorithm.mask_truncated": "mask_truncated_completions",
    "algorithm.epochs": "ppo_epochs num_iterations max_epochs",
    "algorithm.samples_per_update": "ppo_mini_batch_size mini_batch_size global_batch_size",
    "algorithm.micro_batch_tokens": "per_device_train_batch_size ppo_micro_batch_size_per_gpu"
    " micro_train_batch_size ppo_max_token_len_per_gpu micro_batch_size",
    "algorithm.logprob_tokens": "log_prob_micro_batch_size_per_gpu micro_rollout_batch_size"
    " log_prob_max_token_len_per_gpu",
    "algorithm.rollout_correction": "vllm_importance_sampling_correction rollout_is",
    "algorithm.gamma": "gamma",
    "algorithm.teacher": "teacher_model teacher_model_name_or_path",
    "model.path": "model_name_or_path model_path pretrain model_name model_id",
    "model.revision": "model_revision",
    "model.dtype": "bf16 fp16 torch_dtype dtype param_dtype",
    "model.gradient_checkpointing": "gradient_checkpointing enable_gradient_checkpointing",
    "model.freeze_vision": "freeze_vision_tower freeze_vit freeze_visual freeze_prefix",
    "model.max_pixels": "max_pixels",
    "model.min_pixels": "min_pixels",
    "lora.rank": "lora_rank lora_r r",
    "lora.alpha": "lora_alpha",
    "lora.dropout": "lora_dropout",
    "lora.qlora": "load_in_4bit use_qlora",
    "data.path": "dataset_name train_files prompt_data dataset",
    "data.split": "train_split dataset_train_split prompt_split",
    "data.max_samples": "max_samples train_max_samples",
    "data.episodes": "num_train_epochs total_epochs num_episodes epochs total_episodes",
    "data.prompt_max_tokens": "max_prompt_length prompt_max_len max_length",
    "data.system_prompt": "system_prompt format_prompt",
    "rewards.function": "reward_funcs reward_function custom_reward_function remote_rm_url",
    "evaluation.path": "val_files eval_dataset",
    "evaluation.every_steps": "eval_steps test_freq val_freq",
    "checkpoint.every_steps": "save_steps save_freq",
    "checkpoint.keep_last": "save_total_limit save_limit max_ckpt_num max_actor_ckpt_to_keep",
    "checkpoint.remote": "hub_model_id ckpt_path default_local_dir save_checkpoint_path",
    "run.dir": "output_dir",
    "run.max_steps": "max_steps total_training_steps",
    "run.seed": "seed",
    "run.name": "run_name experiment_name",
    "logging.wandb": "report_to logger use_wandb",
    "logging.wandb_project": "project_name wandb_project",
    "cluster.nodes": "nnodes num_nodes actor_num_nodes num_machines",
    "cluster.gpus_per_node": "n_gpus_per_node num_gpus gpus actor_num_gpus_per_node",
    "cluster.gpu": "accelerators gpu accelerator",
    "cluster.spot": "use_spot spot_policy spot",
}
"""Our option, and the last words of the names that others have for it."""

OURS: dict[str, str] = {}
for option, names in OPTIONS.items():
    for name in names.split():
        OURS[name] = option
"""Our option by the last word of another trainer's name."""


OF_SFT = {
    "rollout.prompts_per_step": "sft.batch_size",
    "data.episodes": "sft.epochs",
    "data.prompt_max_tokens": "sft.max_tokens",
}
"""What supervised fine-tuning has instead of an option of ours."""


def name_for_message(path: str) -> str:
    """Our option for `path` as a message names it, with that of supervised fine-tuning where it has another;
    "" where no other trainer's name is known."""
    option = our_option(path)
    return f"{option}, or {OF_SFT[option]} with SFT" if option in OF_SFT else option


def our_option(path: str) -> str:
    """Our option for `path` (`actor_rollout_ref.rollout.n`, `lr`); "" where no other trainer's name is
    known."""
    path = path.strip().lower().replace("-", "_")
    return OURS.get(path.rpartition(".")[2], "")
