"""Keys that older releases knew and the pinned one refuses, with what took their place.

From the `hparams/` of every LLaMA-Factory tag up to v0.9.4 and from transformers 4.57's TrainingArguments. Empty text:
nothing replaces the key, remove it.
"""

from __future__ import annotations

RETIRED = {
    # LLaMA-Factory
    "batch_size": "per_device_train_batch_size",
    "badam_switch_block_every": "badam_switch_interval",
    "cache_path": "tokenized_path",
    "checkpoint_dir": "adapter_name_or_path",
    "dataset_name": "dataset",
    "dpo_beta": "pref_beta",
    "dpo_ftx": "pref_ftx",
    "dpo_loss": "pref_loss",
    "dpo_ref_model": "ref_model",
    "dpo_ref_model_checkpoint": "ref_model_adapters",
    "hf_auth_token": "hf_hub_token",
    "image_dir": "media_dir",
    "image_resolution": "image_max_pixels",
    "name_module_trainable": "freeze_trainable_modules",
    "neft_alpha": "neftune_noise_alpha",
    "new_special_tokens": "add_special_tokens",
    "num_layer_trainable": "freeze_trainable_layers",
    "orpo_beta": "pref_beta",
    "placement_strategy": "",
    "ray_run_name": "",
    "ray_storage_filesystem": "",
    "ray_storage_path": "",
    "ref_model_checkpoint": "ref_model_adapters",
    "reserved_label_len": "",
    "resources_per_worker": "",
    "reward_model_checkpoint": "reward_model_adapters",
    "sft_packing": "packing",
    "train_mm_proj_only": "freeze_vision_tower",
    "video_resolution": "video_max_pixels",
    "visual_inputs": "",
    # transformers
    "dispatch_batches": "accelerator_config",
    "evaluation_strategy": "eval_strategy",
    "fp16_backend": "",
    "fp16_opt_level": "",
    "group_by_length": "train_sampling_strategy",
    "half_precision_backend": "",
    "include_inputs_for_metrics": "include_for_metrics",
    "include_tokens_per_second": "",
    "no_cuda": "use_cpu",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "push_to_hub_model_id": "hub_model_id",
    "push_to_hub_token": "hub_token",
    "save_safetensors": "",
    "split_batches": "accelerator_config",
    "use_legacy_prediction_loop": "",
}
