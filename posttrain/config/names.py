"""Names that other libraries have for our options, and hints from them.

docs/names.md lists them. Our option may count in other units, or serve the same
purpose in another way.
"""

import collections
import difflib
import os
import re
from collections.abc import Collection, Sequence

# Our key (STAGE, ENV and NAME stand for the names in a config) or flag, and
# below it the names. A name with a dot also matches after further nodes.
_TABLE = """
--checkpoint
  model model_args model_id model_name model_name_or_path model_path pretrained
STAGE.steps
  max_steps total_training_steps num_steps train_steps iterations
STAGE.batch.prompts_per_step
  per_device_train_batch_size generation_batch_size train_batch_size
  batch_size per_device_batch_size global_batch_size
STAGE.batch.micro_batch_tokens
  gradient_accumulation_steps accumulation_steps grad_accum_steps
  ppo_micro_batch_size ppo_micro_batch_size_per_gpu micro_batch_size_per_gpu
  ppo_max_token_len_per_gpu log_prob_micro_batch_size_per_gpu micro_batch_size
  train_micro_batch_size compute_logps_micro_batch_size
STAGE.batch.row_tokens
  max_length max_seq_length seq_len max_target_length sequence_length
  max_sequence_length context_length block_size max_prompt_length
  max_prefill_predict_length packing padding_free use_remove_padding
  use_dynamic_bsz
STAGE.updates_per_rollout
  num_iterations ppo_epochs steps_per_generation ppo_mini_batch_size
  mini_batch_size
STAGE.rollout.slots
  per_device_eval_batch_size val_batch_size eval_batch_size use_vllm vllm_mode
  vllm_gpu_memory_utilization gpu_memory_utilization rollout.name
  rollout_engine rollout_vllm_hbm_utilization kv_cache_size
STAGE.rollout.max_lag
  max_staleness staleness_threshold max_async_level max_off_policy_steps
STAGE.optim.lr
  learning_rate actor.optim.lr lr
STAGE.optim.schedule
  lr_scheduler_type warmup_style scheduler.type lr_schedule_type lr_scheduler
  scheduler lr_schedule
STAGE.optim.warmup_steps
  warmup_ratio lr_warmup_steps_ratio warmup_steps_fraction lr_warmup_steps
STAGE.optim.final_lr_fraction
  min_lr_ratio learning_rate_final_fraction
  cosine_learning_rate_final_fraction
STAGE.optim.beta1
  adam_beta1 adam_b1
STAGE.optim.beta2
  adam_beta2 adam_b2
STAGE.optim.eps
  adam_epsilon adam_eps
STAGE.optim.weight_decay
  adam_weight_decay
STAGE.optim.clip_norm
  max_grad_norm grad_clip clip_grad max_norm gradient_clipping_threshold
  gradient_clip_norm grad_norm_clip
STAGE.optim
  opt_type optimizer
STAGE.batch.max_draws
  filter_groups filter_groups.enable filter_groups.max_num_gen_batches
  online_difficulty_filtering dynamic_sampling
STAGE.envs.ENV.group_size
  num_generations rollout.n rollouts_per_example samples_per_prompt
  n_samples_per_prompt
STAGE.envs.ENV.sampler.max_tokens
  max_completion_length max_response_length response_length
  sampling.max_completion_tokens max_tokens_to_generate max_new_tokens
  max_generation_length
STAGE.envs.ENV.rewards
  reward_funcs custom_reward_function custom_reward_function.path reward_fns
  reward_function reward_fn
STAGE.envs.ENV.rewards.NAME.weight
  reward_weights
STAGE.envs.ENV.env.path
  dataset_name train_files assistant_only_loss completion_only_loss
STAGE.envs.ENV.env.eval_path
  val_files
STAGE.envs.ENV.env.columns
  dataset_text_field
STAGE.envs.ENV.algorithm
  adv_estimator algorithm.adv_estimator algo advantage training_mode
  advantage_estimator
STAGE.envs.ENV.algorithm.reference
  teacher_model_name_or_path teacher sync_ref_model ref_model_sync_steps
  ref_model_mixup_alpha
STAGE.envs.ENV.algorithm.roles
  observations
STAGE.envs.ENV.algorithm.scale_rewards
  norm_adv_by_std_in_grpo group_norm normalize_advantages std_normalization
STAGE.envs.ENV.algorithm.length_penalty
  overlong_buffer overlong_buffer.enable
STAGE.envs.ENV.algorithm.mask_truncated
  mask_truncated_completions
STAGE.envs.ENV.algorithm.kl_beta
  beta kl_loss_coef kl_coef kl_ctrl.kl_coef use_kl_loss use_kl_in_reward
STAGE.loss.ref_kl.estimator
  kl_loss_type kl_penalty
STAGE.loss.rl.low
  epsilon clip_ratio clip_ratio_low
STAGE.loss.rl.high
  epsilon_high clip_ratio_high
STAGE.loss.rl.delta
  delta
STAGE.loss.rl.entropy_coef
  entropy_coeff
STAGE.loss.rl.aggregation
  loss_type loss_agg_mode
STAGE.loss.rl
  importance_sampling_level loss_mode policy_loss.loss_mode loss.type
  loss_algo
STAGE.loss.rl.sampler_is_mode
  vllm_importance_sampling_correction vllm_importance_sampling_mode rollout_is
STAGE.loss.rl.sampler_is_clip_max
  vllm_importance_sampling_cap vllm_importance_sampling_clip_max
  rollout_is_threshold behav_imp_weight_cap
STAGE.loss.rl.off_policy_mask
  off_policy_mask_threshold opsm_delta
STAGE.loss.preference.beta
  beta
STAGE.loss.preference
  loss_type
STAGE.loss.preference.gamma
  simpo_gamma
STAGE.loss.preference.reference
  ref_model precompute_ref_log_probs
STAGE.loss.ranking.center_coef
  center_rewards_coefficient
STAGE.pairs.path
  dataset_name train_files
STAGE.pairs.eval_path
  val_files
STAGE.init
  model_name_or_path model.path model.name model_id model_name
  load_parameters_path pretrained_model_name_or_path base_model
  checkpoint_path
model.dtype
  bf16 fp16 torch_dtype mixed_precision precision
model.remat
  gradient_checkpointing enable_gradient_checkpointing ac remat_policy
model.attention
  attn_implementation attn
tokenizer.path
  tokenizer_path tokenizer_name
tokenizer.chat_template
  chat_template_path
tokenizer.eos
  eos_token
tokenizer.pad
  pad_token
STAGE.rollout.cache_dtype
  kv_cache_dtype
STAGE.lora.rank
  lora_r lora_rank lora use_lora use_peft peft_config
STAGE.lora.alpha
  lora_alpha
STAGE.lora.rslora
  use_rslora
STAGE.lora.dora
  use_dora
STAGE.lora.base
  load_in_4bit load_in_8bit
STAGE.lora.targets
  lora_target_modules target_modules
--workdir
  output_dir default_local_dir checkpoint_root_directory base_output_directory
  resume_from_checkpoint resume_mode resume run_name experiment_name
  project_name
seed
  data_seed init_weights_seed data_shuffle_seed shuffle_dataset data.shuffle
  enable_data_shuffling
checkpoint.every
  save_steps save_freq ckpt.interval save_interval_steps checkpoint_period
checkpoint.keep_last
  save_total_limit max_actor_ckpt_to_keep max_to_keep
  max_num_checkpoints_to_keep
checkpoint.keep_every
  ckpt.keep_interval
STAGE.eval.every
  eval_steps test_freq eval.interval eval_every_n_steps eval_interval
STAGE.eval.prompts
  limit eval_samples max_eval_samples
STAGE.eval.best
  metric_for_best_model load_best_model_at_end
STAGE.eval.patience
  early_stopping_patience
metrics.trackers
  report_to trainer.logger
metrics.log_seconds
  logging_steps log_period
metrics.rollouts_every
  log_completions rollout_data_dir
mesh.data
  ici_data_parallelism dcn_data_parallelism n_gpus_per_node nnodes num_gpus
  gpus num_devices
mesh.fsdp
  fsdp deepspeed fsdp_size ici_fsdp_parallelism
mesh.tensor
  vllm_tensor_parallel_size tensor_model_parallel_size tp
  ici_tensor_parallelism
compilation_cache
  jax_cache_dir
--config=RECIPE:DIR,data.jsonl,epochs=3
  num_train_epochs total_epochs num_epoch epochs num_epochs epoch
--config=RECIPE:DIR,data.jsonl,module:function
  model data dataset train train_dataset train_data train_file eval_dataset
  eval_data rewards reward
--config=RECIPE:DIR (its held-out tasks, such as gsm8k_grpo:DIR)
  task tasks benchmark benchmarks num_fewshot
--folder
  output_dir output outfile output_path out_dir save_directory
--answers
  output_path log_samples
--output
  output_dir output_path out_file outfile
--max_tokens
  max_new_tokens max_completion_tokens max_gen_toks
--samples
  n num_generations num_return_sequences
--served_name
  served_model_name name
"""
NAMES = {
  key: ' '.join(theirs.split())
  for key, theirs in re.findall(r'^(\S.*)\n((?:  .*\n)+)', _TABLE, re.M)
}
_SHOWN = 3  # keys in a hint


def hint(node: str, name: str, keys: Sequence[str]) -> str:
  """Returns what a key that a config lacks may mean; '' if nothing is near.

  Args:
    node: dotted key of the node that lacks it, such as 'config.sft.optim'.
    name: the key below the node; it may have dots.
    keys: dotted keys that exist, of the node or of the whole config.
  """
  # The nearest nodes first.
  keys = sorted(keys, key=lambda x: -len(os.path.commonprefix([x, node])))
  if ours := _ours(name, ('config', 'workdir')):
    texts = [re.sub('STAGE|ENV|NAME', '[^.]+', re.escape(x)) for x in ours]
    pattern = re.compile(rf'config\.({"|".join(texts)})')
    matches = [x for x in keys if pattern.fullmatch(x)]
    return f'; see {" or ".join((matches or ours)[:_SHOWN])}'
  matches = [x for x in keys if x.endswith(f'.{name}')]
  if not matches:
    depth = name.count('.') + 1
    ends = {
      '.'.join(x.split('.')[-depth:]): x for x in reversed(keys) if x != node
    }
    near = difflib.get_close_matches(name, ends, 1, 0.75)
    matches = [ends[x] for x in near]
  return f'; did you mean {" or ".join(matches[:_SHOWN])}?' if matches else ''


def flag(name: str, flags: Collection[str]) -> str:
  """Returns the flag that an unknown one may mean, or ''.

  Args:
    name: the unknown flag, without dashes.
    flags: names of the command's flags.
  """
  keys = _ours(name, flags)[:_SHOWN]
  flags = [x if x.startswith('--') else f'--config.{x}' for x in keys]
  return ' or '.join(flags)


def _ours(name: str, flags: Collection[str]) -> list[str]:
  """Returns our keys for a dotted name, and for it without its first parts.

  Those of a command that has some of the flags.
  """
  parts = name.replace('-', '_').split('.')
  ends = ['.'.join(parts[i:]) for i in range(len(parts))]
  keys = [x for end in ends for x in _KEYS.get(end, ())]
  return [
    x for x in keys if (re.findall(r'^--(\w+)', x) or ['config'])[0] in flags
  ]


_KEYS = collections.defaultdict(list)  # other libraries' name -> our keys
for _key, _names in NAMES.items():
  for _name in _names.split():
    _KEYS[_name].append(_key)
