"""Which keys the memory model reads, which cannot change memory, and so which must be refused until modelled."""

from __future__ import annotations

from dpofit.recipe.keys import known_keys, words
from dpofit.recipe.settings import Settings

# Read into typed fields of Recipe (build.py).
TYPED = words(
    """
    model_name_or_path stage finetuning_type deepspeed per_device_train_batch_size per_device_eval_batch_size
    gradient_accumulation_steps cutoff_len do_eval eval_strategy val_size eval_dataset packing neat_packing
    pref_loss pref_ftx ld_alpha ref_model ref_model_adapters ref_model_quantization_bit
    freeze_trainable_layers freeze_trainable_modules freeze_extra_modules lora_rank lora_target resize_vocab
    lora_dropout additional_target use_dora use_rslora pissa_init create_new_adapter adapter_name_or_path
    quantization_bit quantization_method quantization_type double_quantization bf16 fp16 pure_bf16
    upcast_layernorm upcast_lmhead_output disable_gradient_checkpointing use_reentrant_gc
    gradient_checkpointing gradient_checkpointing_kwargs use_unsloth use_unsloth_gc enable_liger_kernel
    flash_attn optim torch_empty_cache_steps save_only_model save_total_limit save_strategy
    weight_decay use_galore galore_target galore_rank galore_proj_type galore_layerwise
    use_apollo apollo_target apollo_rank apollo_proj apollo_proj_type apollo_layerwise
    use_badam badam_mode badam_update_ratio use_adam_mini use_muon shift_attn rope_scaling
    """
)

# Cannot change what the model of a run holds in memory, by reason.
HARMLESS: dict[str, str] = {
    "names, paths and accounts": """
        adapter_folder cache_dir model_revision dataset dataset_dir media_dir tokenized_path output_dir
        overwrite_output_dir logging_dir offload_folder run_name project trackio_space_id hub_always_push hub_model_id
        hub_private_repo hub_revision hub_strategy hub_token push_to_hub hf_hub_token ms_hub_token om_hub_token
        trust_remote_code resume_from_checkpoint ignore_data_skip restore_callback_states_from_checkpoint
        data_shared_file_system local_rank master_addr master_port ray_num_workers ray_init_kwargs""",
    "logging, progress and plots": """
        report_to logging_steps logging_strategy logging_first_step logging_nan_inf_filter log_level log_level_replica
        log_on_each_node disable_tqdm plot_loss include_num_input_tokens_seen include_effective_tokens_per_second
        average_tokens_across_devices print_param_status skip_memory_metrics debug use_swanlab swanlab_api_key
        swanlab_lark_secret swanlab_lark_webhook_url swanlab_logdir swanlab_mode swanlab_project swanlab_run_name
        swanlab_workspace""",
    "numbers of the optimizer and the schedule, not its tensors": """
        learning_rate adam_beta1 adam_beta2 adam_epsilon max_grad_norm num_train_epochs max_steps
        lr_scheduler_type lr_scheduler_kwargs warmup_ratio warmup_steps loraplus_lr_ratio loraplus_lr_embedding
        early_stopping_steps""",
    "scalars of the loss": """
        pref_beta pref_bco_weight dpo_label_smoothing simpo_gamma kto_chosen_weight kto_rejected_weight lora_alpha
        ignore_pad_token_for_loss""",
    "how rows are chosen, read and written; lengths are given to the planner": """
        template max_samples streaming buffer_size mix_strategy interleave_probs overwrite_cache
        preprocessing_batch_size preprocessing_num_workers tool_format default_system enable_thinking
        preserve_thinking train_on_prompt mask_history eval_on_each_dataset disable_shuffling use_fast_tokenizer
        split_special_tokens data_seed seed full_determinism train_sampling_strategy length_column_name
        remove_unused_columns label_names dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers
        dataloader_prefetch_factor dataloader_drop_last accelerator_config sortish_sampler""",
    "when things happen, not how large they are": """
        do_train save_steps eval_steps eval_delay eval_on_start load_best_model_at_end metric_for_best_model
        greater_is_better save_on_each_node enable_jit_checkpoint eval_use_gather_object""",
    "communication set-up": """
        ddp_backend ddp_timeout ddp_broadcast_buffers ddp_find_unused_parameters""",
    "numerics of the same tensors": "tf32",
    "inference, export and generation only": """
        infer_backend infer_dtype use_kv_cache use_cache export_device export_dir export_hub_model_id
        export_legacy_format export_quantization_bit export_quantization_dataset export_quantization_maxlen
        export_quantization_nsamples export_size vllm_config vllm_enforce_eager vllm_gpu_util vllm_max_lora_rank
        vllm_maxlen sglang_config sglang_lora_backend sglang_maxlen sglang_mem_fraction sglang_tp_size do_sample
        length_penalty max_length max_new_tokens num_beams repetition_penalty skip_special_tokens temperature top_k
        top_p eval_num_beams generation_config generation_max_length generation_num_beams quantization_device_map""",
    "images, video and sound; models with towers are refused by their shape": """
        image_max_pixels image_min_pixels image_do_pan_and_scan crop_to_patches video_max_pixels video_min_pixels
        video_fps video_maxlen use_audio_in_video audio_sampling_rate freeze_vision_tower
        freeze_multi_modal_projector""",
    "profiling output; off unless asked for": """
        profiler_active_steps profiler_output_dir profiler_profile_memory profiler_record_shapes profiler_repeat
        profiler_wait_steps profiler_warmup_steps profiler_with_stack""",
}
# Read only when the switch that owns them is on, and that switch is itself checked.
OWNED_BY: dict[str, str] = {
    "galore_": "use_galore",
    "apollo_": "use_apollo",
    "badam_": "use_badam",
    "asft_": "use_asft_loss",
    "eaft_": "use_eaft_loss",
    "fp8_": "fp8",
    "kt_": "use_kt",
    "hyper_parallel_": "use_hyper_parallel",
    "ppo_": "",  # stage ppo, refused
    "reward_model": "",  # stage ppo, refused
    "oft_": "",  # finetuning_type oft, refused
    "module_dropout": "",
    "pissa_iter": "pissa_init",
    "liger_kernel_config": "use_liger_kernel",
    "init_special_tokens": "new_special_tokens_config",
}  # fmt: skip
_HARMLESS_KEYS = frozenset(key for keys in HARMLESS.values() for key in keys.split())


def unmodelled_keys(settings: Settings) -> tuple[str, ...]:
    """Keys given, away from their default, that may change memory and that nothing here reads."""
    return tuple(sorted(key for key in settings.given if _may_change_memory(key) and _away_from_default(settings, key)))


def _may_change_memory(key: str) -> bool:
    if key in TYPED or key in _HARMLESS_KEYS or key not in known_keys():
        return False
    return not any(key.startswith(prefix) for prefix in OWNED_BY)


def _away_from_default(settings: Settings, key: str) -> bool:
    value, default = settings[key], known_keys()[key].default
    return bool(value != default and (value or default))
