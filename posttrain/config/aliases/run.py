"""Other libraries' names of algorithms, losses, models and runs."""

from posttrain.config.aliases import row

_ALGORITHM = (
  row.equal(
    'STAGE.envs.ENV.algorithm',
    'it is a name, as grpo, rloo or opd, or a JSON object with its type',
    verl='adv_estimator algorithm.adv_estimator',
    prime='algo advantage training_mode',
    tunix='advantage_estimator',
  ),
  row.equal(
    'STAGE.envs.ENV.algorithm.reference',
    'algorithms opd and opsd read it; sft on its samples is '
    'sampler={"type": "frozen", "model": ...}',
    trl='teacher_model_name_or_path',
    prime='teacher',
  ),
  row.equal(
    'STAGE.envs.ENV.algorithm.roles',
    'with algorithm=echo',
    prime='observations',
  ),
  row.equal(
    'STAGE.envs.ENV.algorithm.scale_rewards',
    "it is 'none', 'group' or 'batch'",
    verl='norm_adv_by_std_in_grpo',
    prime='group_norm',
    others='normalize_advantages std_normalization',
  ),
  row.equal(
    'STAGE.envs.ENV.algorithm.length_penalty',
    'its type is overlong',
    verl='overlong_buffer overlong_buffer.enable',
  ),
  row.equal(
    'STAGE.envs.ENV.algorithm.reference',
    'a moving one is ema:0.99 or snapshot:50',
    trl='sync_ref_model ref_model_sync_steps ref_model_mixup_alpha',
  ),
)

_LOSSES = (
  *row.of(
    ('tokens',),
    row.equal(
      'STAGE.envs.ENV.algorithm.kl_beta',
      "the estimator of TRL's loss is loss.ref_kl.estimator=k3",
      trl='beta',
      verl='kl_loss_coef kl_coef kl_ctrl.kl_coef',
      tunix='beta',
    ),
    row.none(
      'STAGE.envs.ENV.algorithm.kl_beta',
      'there is a KL penalty where {} is above 0',
      verl='use_kl_loss use_kl_in_reward',
    ),
    row.equal(
      'STAGE.loss.ref_kl.estimator',
      "it is 'reverse' or 'k3'",
      verl='kl_loss_type kl_penalty',
    ),
    row.equal(
      'STAGE.loss.rl.low',
      'with loss.rl={"type": "clip"}, as a distance from 1',
      trl='epsilon',
      verl='clip_ratio clip_ratio_low',
      tunix='epsilon',
    ),
    row.equal(
      'STAGE.loss.rl.high',
      'with loss.rl={"type": "clip"}, as a distance from 1',
      trl='epsilon_high',
      verl='clip_ratio_high',
      tunix='epsilon_high',
    ),
    row.equal(
      'STAGE.loss.rl.delta', 'with loss.rl={"type": "clip"}', trl='delta'
    ),
    row.equal('STAGE.loss.rl.entropy_coef', verl='entropy_coeff'),
    row.equal(
      'STAGE.loss.rl.aggregation',
      "'token' is TRL's dapo and verl's token-mean, 'sequence' TRL's grpo, "
      "'constant' TRL's dr_grpo",
      trl='loss_type',
      verl='loss_agg_mode',
    ),
    row.equal(
      'STAGE.loss.rl',
      'it is a name, as clip, gspo or cispo, or a JSON object with its type',
      trl='importance_sampling_level',
      verl='loss_mode policy_loss.loss_mode',
      prime='loss.type',
      tunix='loss_algo',
    ),
    row.equal(
      'STAGE.loss.rl.sampler_is_mode',
      'ours is off by default',
      trl='vllm_importance_sampling_correction vllm_importance_sampling_mode',
      verl='rollout_is',
    ),
    row.equal(
      'STAGE.loss.rl.sampler_is_clip_max',
      trl='vllm_importance_sampling_cap vllm_importance_sampling_clip_max',
      verl='rollout_is_threshold',
    ),
  ),
  *row.of(
    ('preference',),
    row.equal('STAGE.loss.preference.beta', trl='beta'),
    row.equal(
      'STAGE.loss.preference',
      "a type replaces the node: ipo_norm is TRL's ipo",
      trl='loss_type',
    ),
    row.equal(
      'STAGE.loss.preference.gamma',
      'with loss.preference=simpo',
      trl='simpo_gamma',
    ),
    row.equal('STAGE.loss.preference.reference', trl='ref_model'),
    row.none(
      'STAGE.loss.preference.reference',
      'the logprobs of {} are always computed before training',
      trl='precompute_ref_log_probs',
    ),
  ),
  *row.of(
    ('ranking',),
    row.equal(
      'STAGE.loss.ranking.center_coef', trl='center_rewards_coefficient'
    ),
  ),
  *row.of(
    row.PAIRS,
    row.equal('STAGE.pairs.path', trl='dataset_name', verl='train_files'),
    row.equal('STAGE.pairs.eval_path', verl='val_files'),
  ),
)

_MODEL = (
  row.equal(
    'STAGE.init',
    'model and tokenizer.path name the same directory; recipes for own data '
    'take it once, as in --config=sft:DIR,data.jsonl',
    trl='model_name_or_path',
    verl='model.path',
    prime='model.name',
    tunix='model_id',
    maxtext='model_name load_parameters_path',
    others='pretrained_model_name_or_path base_model checkpoint_path',
  ),
  row.equal(
    'model.dtype',
    "it is 'float32' or 'bfloat16'",
    trl='bf16 fp16 torch_dtype',
    verl='mixed_precision',
    others='precision',
  ),
  row.equal(
    'model.remat',
    "it is 'none', 'attention' or 'block'",
    trl='gradient_checkpointing',
    verl='enable_gradient_checkpointing',
    prime='ac',
    maxtext='remat_policy',
  ),
  row.equal('model.attention', trl='attn_implementation', prime='attn'),
  row.equal(
    'tokenizer.path', maxtext='tokenizer_path', others='tokenizer_name'
  ),
  row.equal('tokenizer.chat_template', trl='chat_template_path'),
  row.equal('tokenizer.eos', trl='eos_token'),
  row.equal('tokenizer.pad', trl='pad_token'),
  *row.of(
    ('tokens', 'preference'),
    row.equal(
      'STAGE.lora.rank', trl='lora_r', verl='lora_rank', maxtext='lora_rank'
    ),
    row.none(
      'STAGE.lora.rank',
      'LoRA is on where {} is above 0',
      trl='use_peft peft_config',
    ),
    row.equal('STAGE.lora.alpha', trl='lora_alpha', verl='lora_alpha'),
    row.equal(
      'STAGE.lora.targets',
      'it is a regex on the paths of weights',
      trl='lora_target_modules',
      verl='target_modules',
    ),
  ),
)

_RUN = (
  row.equal(
    '--workdir',
    trl='output_dir',
    verl='default_local_dir',
    prime='output_dir',
    tunix='checkpoint_root_directory',
    maxtext='base_output_directory',
  ),
  row.none(
    '--workdir',
    'the same command with the same {} continues',
    trl='resume_from_checkpoint',
    verl='resume_mode',
    others='resume',
  ),
  row.none(
    '--workdir',
    'a run is named by its {}',
    trl='run_name',
    verl='experiment_name project_name',
    maxtext='run_name',
  ),
  row.equal(
    'seed', trl='data_seed', maxtext='init_weights_seed data_shuffle_seed'
  ),
  row.none(
    'seed',
    'the order of the rows is drawn anew every epoch, by {}',
    trl='shuffle_dataset',
    verl='data.shuffle',
    maxtext='enable_data_shuffling',
  ),
  row.equal(
    'checkpoint.every',
    trl='save_steps',
    verl='save_freq',
    prime='ckpt.interval',
    tunix='save_interval_steps',
    maxtext='checkpoint_period',
  ),
  row.equal(
    'checkpoint.keep_last',
    trl='save_total_limit',
    verl='max_actor_ckpt_to_keep',
    tunix='max_to_keep',
    maxtext='max_num_checkpoints_to_keep',
  ),
  row.equal(
    'checkpoint.keep_every', 'it counts steps', prime='ckpt.keep_interval'
  ),
  row.equal(
    'STAGE.eval.every',
    trl='eval_steps',
    verl='test_freq',
    prime='eval.interval',
    tunix='eval_every_n_steps',
    maxtext='eval_interval',
  ),
  row.equal(
    'STAGE.eval.best',
    'it names the metric, as eval/nll/ENV',
    trl='metric_for_best_model load_best_model_at_end',
  ),
  row.equal('STAGE.eval.patience', trl='early_stopping_patience'),
  row.equal('metrics.trackers', trl='report_to', verl='trainer.logger'),
  row.none(
    'metrics.log_seconds',
    'metrics.jsonl has every step; {} is between lines on the screen',
    trl='logging_steps',
    maxtext='log_period',
  ),
  row.equal(
    'metrics.rollouts_every',
    'it counts steps',
    trl='log_completions',
    verl='rollout_data_dir',
  ),
  row.equal('mesh.data', maxtext='ici_data_parallelism dcn_data_parallelism'),
  row.equal(
    'mesh.fsdp',
    trl='fsdp deepspeed',
    verl='fsdp_size',
    maxtext='ici_fsdp_parallelism',
  ),
  row.equal(
    'mesh.tensor',
    trl='vllm_tensor_parallel_size',
    verl='tensor_model_parallel_size',
    prime='tp',
    maxtext='ici_tensor_parallelism',
  ),
  row.none(
    'mesh.data',
    'all devices of the machine are used; {} and its neighbours lay them out',
    verl='n_gpus_per_node nnodes',
    others='num_gpus gpus num_devices',
  ),
  row.equal('compilation_cache', maxtext='jax_cache_dir'),
)

SECTIONS = {
  'Algorithms': row.of(('tokens',), *_ALGORITHM),
  'Losses and pairs': _LOSSES,
  'Models and adapters': _MODEL,
  'Runs and devices': _RUN,
}
