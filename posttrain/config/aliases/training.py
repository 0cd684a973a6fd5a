"""Other libraries' names of batches, the optimizer and sampling."""

from posttrain.config.aliases import row

_BATCH = (
  row.equal(
    'STAGE.steps',
    'a step is one batch of prompts_per_step',
    trl='max_steps',
    verl='total_training_steps',
    prime='max_steps',
    tunix='max_steps',
    others='num_steps train_steps iterations',
  ),
  row.none(
    'STAGE.steps',
    '{} counts batches, and an epoch is the number of prompts divided by '
    'batch.prompts_per_step',
    trl='num_train_epochs',
    verl='total_epochs',
    maxtext='num_epoch',
    others='epochs num_epochs epoch',
  ),
  row.equal(
    'STAGE.batch.prompts_per_step',
    'it counts prompts or rows, not completions, over all devices',
    trl='per_device_train_batch_size generation_batch_size',
    verl='train_batch_size',
    prime='batch_size',
    maxtext='per_device_batch_size',
    others='batch_size global_batch_size',
  ),
  row.none(
    'STAGE.batch.micro_batch_tokens',
    'a step has as many micro-batches of {} tokens as it needs',
    trl='gradient_accumulation_steps',
    tunix='gradient_accumulation_steps',
    maxtext='gradient_accumulation_steps',
    others='accumulation_steps grad_accum_steps',
  ),
  row.equal(
    'STAGE.batch.micro_batch_tokens',
    'it counts tokens over all devices',
    verl='ppo_micro_batch_size ppo_micro_batch_size_per_gpu '
    'micro_batch_size_per_gpu ppo_max_token_len_per_gpu '
    'log_prob_micro_batch_size_per_gpu',
    prime='micro_batch_size',
    tunix='train_micro_batch_size compute_logps_micro_batch_size',
  ),
  row.equal(
    'STAGE.batch.row_tokens',
    'it holds the prompt and the completion',
    trl='max_length max_seq_length',
    prime='seq_len',
    maxtext='max_target_length',
    others='sequence_length max_sequence_length context_length block_size',
  ),
  row.none(
    'STAGE.batch.row_tokens',
    'prompt and completion together have {} tokens',
    trl='max_prompt_length',
    verl='max_prompt_length',
    tunix='max_prompt_length',
    maxtext='max_prefill_predict_length',
  ),
  row.none(
    'STAGE.batch.row_tokens',
    'samples are always packed into rows of {} tokens',
    trl='packing padding_free',
    verl='use_remove_padding use_dynamic_bsz',
    maxtext='packing',
  ),
  row.equal(
    'STAGE.updates_per_rollout',
    'each update is over the whole batch',
    trl='num_iterations',
    verl='ppo_epochs',
    tunix='num_iterations',
  ),
  row.none(
    'STAGE.updates_per_rollout',
    'each of the {} updates is over the whole batch',
    trl='steps_per_generation',
    verl='ppo_mini_batch_size',
    tunix='mini_batch_size',
  ),
  row.none(
    'STAGE.rollout.slots',
    'evaluation decodes {} sequences at a time, over all devices',
    trl='per_device_eval_batch_size',
    verl='val_batch_size',
    others='eval_batch_size',
  ),
)

_OPTIM = (
  row.equal(
    'STAGE.optim.lr',
    trl='learning_rate',
    verl='actor.optim.lr',
    tunix='learning_rate',
    maxtext='learning_rate',
  ),
  row.equal(
    'STAGE.optim.schedule',
    "it is 'constant', 'linear' or 'cosine'",
    trl='lr_scheduler_type',
    verl='lr_scheduler_type warmup_style',
    prime='scheduler.type',
    maxtext='lr_schedule_type',
    others='lr_scheduler scheduler lr_schedule',
  ),
  row.equal(
    'STAGE.optim.warmup_steps',
    'it is a number of updates, not a share of them',
    trl='warmup_ratio',
    verl='lr_warmup_steps_ratio',
    maxtext='warmup_steps_fraction',
  ),
  row.equal('STAGE.optim.warmup_steps', verl='lr_warmup_steps'),
  row.equal(
    'STAGE.optim.final_lr_fraction',
    verl='min_lr_ratio',
    maxtext='learning_rate_final_fraction cosine_learning_rate_final_fraction',
  ),
  row.equal('STAGE.optim.beta1', trl='adam_beta1', maxtext='adam_b1'),
  row.equal('STAGE.optim.beta2', trl='adam_beta2', maxtext='adam_b2'),
  row.equal('STAGE.optim.eps', trl='adam_epsilon', maxtext='adam_eps'),
  row.equal('STAGE.optim.weight_decay', maxtext='adam_weight_decay'),
  row.equal(
    'STAGE.optim.clip_norm',
    trl='max_grad_norm',
    verl='grad_clip clip_grad',
    prime='max_norm',
    maxtext='gradient_clipping_threshold',
    others='gradient_clip_norm grad_norm_clip',
  ),
  row.none(
    'STAGE.optim',
    'the optimizer is AdamW, with the options of {}',
    maxtext='opt_type',
    others='optimizer',
  ),
)

_SAMPLING = (
  row.equal(
    'STAGE.batch.max_draws',
    'the largest number of tasks drawn in a step',
    verl='filter_groups filter_groups.enable filter_groups.max_num_gen_batches',
    prime='online_difficulty_filtering',
    others='dynamic_sampling',
  ),
  row.equal(
    'STAGE.envs.ENV.group_size',
    trl='num_generations',
    verl='rollout.n',
    prime='rollouts_per_example',
    tunix='num_generations',
    others='samples_per_prompt n_samples_per_prompt',
  ),
  row.equal(
    'STAGE.envs.ENV.sampler.max_tokens',
    trl='max_completion_length',
    verl='max_response_length response_length',
    prime='sampling.max_completion_tokens',
    tunix='max_tokens_to_generate',
    others='max_new_tokens max_generation_length',
  ),
  row.none(
    'STAGE.envs.ENV.sampler',
    'training samples from the whole distribution, or logprobs would be '
    'wrong; generate and serve have it',
    trl='top_p top_k min_p',
    verl='rollout.top_p rollout.top_k',
    tunix='top_p top_k',
  ),
  row.none(
    'STAGE.rollout.slots',
    'sampling is in this process, and {} bounds its memory',
    trl='use_vllm vllm_mode vllm_gpu_memory_utilization',
    verl='gpu_memory_utilization rollout.name',
    tunix='rollout_engine rollout_vllm_hbm_utilization kv_cache_size',
  ),
  row.none(
    'STAGE.steps',
    'sampling and training alternate, so that no sample is older than its step',
    trl='max_staleness',
    verl='staleness_threshold',
    prime='max_async_level max_off_policy_steps',
  ),
  row.equal(
    'STAGE.envs.ENV.rewards',
    'it maps names to functions, as in {"short": {"fn": "rewards:short"}}',
    trl='reward_funcs',
    verl='custom_reward_function custom_reward_function.path',
    tunix='reward_fns',
    others='reward_function reward_fn',
  ),
  row.equal('STAGE.envs.ENV.rewards.NAME.weight', trl='reward_weights'),
  row.equal('STAGE.envs.ENV.env.path', trl='dataset_name', verl='train_files'),
  row.equal('STAGE.envs.ENV.env.eval_path', verl='val_files'),
  row.none(
    'STAGE.envs.ENV.env.columns',
    'rows have prompt and completion, or messages; {} renames columns',
    trl='dataset_text_field',
  ),
  row.none(
    'STAGE.envs.ENV.env.path',
    'of the rows of {}, only completions or turns of the assistant train',
    trl='assistant_only_loss completion_only_loss',
  ),
)

SECTIONS = {
  'Steps and batches': _BATCH,
  'Optimizer': _OPTIM,
  'Sampling, rewards and data': row.of(('tokens',), *_SAMPLING),
}
