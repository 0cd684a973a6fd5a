"""The commands as functions, for notebooks and programs.

    from posttrain import api

    # TRL's signature: a value each. Completions are lists of messages where
    # the recipe's prompts are, as here, and strings where those are strings.
    def short(completions, **kwargs):
      return [-len(messages[-1]['content']) for messages in completions]

    run = api.load('configs/arithmetic.py', {'grpo.steps': 20, 'seed': 1})
    final = api.train(run, 'runs/short', rewards={'short': short})
    print(api.evaluate('runs/short', against='runs/short/checkpoints/sft'))
    api.generate('runs/short', ['What is 38 + 47?'])[0].text
    api.export('runs/short', 'exported')

Each function makes the checks of its command, and raises ValueError with the
line that the command prints, flags without their dashes. The import is cheap;
jax is imported by the first call that needs it.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

import posttrain.evaluate
import posttrain.export
import posttrain.generate
from posttrain import main, schema, types
from posttrain.checkpoints import policies
from posttrain.config import checks, python_options
from posttrain.decode import requests
from posttrain.evaluation import comparison
from posttrain.util import hub, imports

Options = python_options.Options
Rewards = python_options.Rewards
Answer = posttrain.generate.Answer


def load(
  recipe: str,
  options: Options | None = None,
  *,
  rewards: Rewards | None = None,
  trust_config: bool = False,
  workdir: str | None = None,
  **others: Any,
) -> schema.Run:
  """Reads a recipe; returns its checked options.

  Args:
    recipe: `FILE.py`, `FILE.py:ARGUMENT`, or the config.json of a workdir.
    options: values for keys, applied in order: `{'grpo.optim.lr': 1e-4}` is
      `--config.grpo.optim.lr=1e-4` of the command. A dict replaces a node; a
      text is read as on the command line, and the name of the only stage may
      be left out. A function or class stands for its `import_path`, and a
      key may begin with `config.`, as in errors.
    rewards: reward functions, see `train`; the recipe needs none then.
    trust_config: whether a config.json may name any function and server.
    workdir: the folder that `train` gets. A run in it that is continued keeps
      the commits of the models that it has from the hub's cache, by id.
    **others: none; other libraries take data and options as arguments.

  Raises:
    ValueError: names the key that is wrong and the values it allows; or a
      commit that is to be kept is not in the cache any more.
  """
  if others:
    raise ValueError(
      'load must get data as a file in its first argument, as in '
      "load('sft:DIR,rows.jsonl'), with a JSON object on each line, and other "
      f"options as in load(recipe, {{'optim.lr': 1e-4}}): got {[*others]}"
    )
  functions, kept = python_options.named(rewards), {}
  overrides = python_options.overrides(options, kept)
  with hub.keeping(workdir):
    run = main.load(os.fspath(recipe), overrides, trust_config, check=False)
  run = python_options.with_rewards(run, functions, kept)
  checks.check(run)
  return run


def import_path(value: Callable[..., Any]) -> str:
  """Returns an import path for a function or class, for a config.

  It goes where a config takes one: `rewards.NAME.fn`, or `import_path` of a
  custom environment or algorithm. What cannot be imported (a notebook defines
  it) gets a path that is valid in this process: a run with it is continued
  after the same call in another process, not from the command line.

  Raises:
    ValueError: the object cannot be called, or has no name.
  """
  return imports.path(value)


def train(
  run: schema.Run,
  workdir: str,
  *,
  rewards: Rewards | None = None,
  time_limit: float | None = None,
) -> dict[str, Any]:
  """Trains a run from its newest checkpoint to its end; writes its report.

  Args:
    run: the options, from `load`.
    workdir: a new folder, or one of the same run, which is continued.
    rewards: reward functions by name, with TRL's signature; not needed again
      if `load` had them. A function alone, or a list of them, has the names
      that the functions have. They replace the
      rewards of each environment whose answers the policy samples, in all
      stages; `'STAGE.ENVIRONMENT.NAME'` is for one alone. What cannot be
      imported is kept by its own name, see `import_path`: a function of that
      name in a later call replaces it, in earlier runs too.
    time_limit: seconds of the process before which it saves and stops.

  Returns:
    The final evaluation: `stage`, `step` and every `eval/*` value.

  Raises:
    ValueError: options, weights, rewards or workdir do not fit each other, or
      `run` has another commit of a model of the hub than the workdir; raised
      before anything is compiled.
    preemption.Preempted: stopped by SIGTERM or the time limit; all is saved.
  """
  if not isinstance(run, schema.Run):
    raise ValueError(f'run must be what load returns: got {run!r}')
  if functions := python_options.named(rewards):
    run = python_options.with_rewards(run, functions, {})
    checks.check(run)
  final = main.train(run, workdir, time_limit)
  assert final is not None, 'this process is the only one'
  return final


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """The measurements of `evaluate`; as a text, the table of the command."""

  policy: comparison.Measurement
  against: comparison.Measurement | None

  @property
  def values(self) -> dict[str, Any]:
    """The numbers by name.

    `eval/pass_rate/ENV`, its bounds `eval/pass_rate_low/ENV` and `_high`; with
    a second policy `against/pass_rate/ENV`, `difference/pass_rate/ENV` and
    their bounds; and so for each measure of the table.
    """
    return comparison.to_json(self.policy, self.against)

  def __str__(self) -> str:
    return '\n'.join(comparison.text(self.policy, self.against))


def evaluate(
  checkpoint: str,
  *,
  against: str | None = None,
  config: str | None = None,
  options: Options | None = None,
  stage: str | None = None,
  trust_config: bool = False,
) -> Evaluation:
  """Measures one policy, or two, on held-out tasks and pairs; or reward models.

  Args:
    checkpoint: a workdir, a stage's or a step's folder, or a HuggingFace or
      PEFT directory.
    against: a second policy with the same model and tokenizer, or a second
      reward model.
    config: a recipe whose tasks and options replace those of the run; required
      for a directory.
    options: values for keys, as in `load`.
    stage: whose tasks are answered; None = the checkpoint's, or the recipe's
      last.
    trust_config: whether stored options may name any function and server.

  Raises:
    ValueError: weights and options do not fit.
    TooManyErrors: environments failed too often.
  """
  flags = posttrain.evaluate.Flags(
    checkpoint=checkpoint,
    against=against,
    config=config,
    overrides=python_options.overrides(options, {}),
    stage=stage,
    trust_config=trust_config,
  )
  return Evaluation(*posttrain.evaluate.measure(flags))


def policy(path: str, *, template_variables: Options | None = None):
  """Loads a policy onto one device; `generate` takes it any number of times.

  Args:
    path: a workdir, a stage's or a step's folder, or a HuggingFace or PEFT
      directory.
    template_variables: variables of the chat template of a directory.

  Returns:
    `posttrain.checkpoints.policies.Policy`.

  Raises:
    ValueError: the checkpoint is missing, damaged, or has no tokenizer.
  """
  return policies.load(
    path, variables=json.dumps(dict(template_variables or {}))
  )


def trainer(
  path: str,
  *,
  adapter: schema.Lora | None = None,
  seed: int = 0,
  template_variables: Options | None = None,
):
  """Loads a policy that trains in a loop of the caller's.

      mine = api.trainer('runs/short', adapter=schema.Lora(rank=16))
      api.generate(mine.policy(), prompts, temperature=1.0)
      mine.forward_backward(data, 'importance_sampling')
      mine.optim_step(optim.Adam(learning_rate=1e-4))
      mine.save('runs/mine')

  Args:
    path: as in `policy`.
    adapter: options of a LoRA; None = all weights train.
    seed: of the adapter's initial values.
    template_variables: as in `policy`.

  Returns:
    `posttrain.training.trainer.Trainer`.

  Raises:
    ValueError: as `policy`, or LoRA does not fit the model.
  """
  from posttrain.training import trainer

  variables = json.dumps(dict(template_variables or {}))
  base = policies.load(path, variables=variables, initial=True)
  return trainer.Trainer(base, adapter=adapter, seed=seed)


def generate(
  policy: str | policies.Policy,
  prompts: Sequence[str | Sequence[types.Message]],
  *,
  max_tokens: int | None = None,
  temperature: float = 0.0,
  top_k: int = 0,
  top_p: float = 1.0,
  min_p: float = 0.0,
  seed: int = 0,
) -> list[Answer]:
  """Samples an answer to each prompt.

  Args:
    policy: a path, see `policy`, or what `policy` has loaded.
    prompts: a text is a user's message; or a list of messages each.
    max_tokens: longest answer; None = as in the stage's evaluation, or 256.
    temperature: 0 takes the most likely token.
    top_k: keeps the k most likely tokens; 0 keeps all.
    top_p: keeps the most likely tokens whose probabilities reach this sum.
    min_p: keeps tokens this probable relative to the most likely one.
    seed: equal seeds give equal answers.

  Raises:
    ValueError: the policy has no tokenizer, or a prompt does not fit it.
  """
  if isinstance(prompts, str):
    raise ValueError(f'prompts must be a list, as in [prompt]: got {prompts!r}')
  is_loaded = isinstance(policy, policies.Policy)
  loaded = policy if is_loaded else policies.load(policy)
  ids = [
    loaded.ids([{'role': 'user', 'content': x}] if isinstance(x, str) else x)
    for x in prompts
  ]
  sampling = requests.Sampling(temperature, top_k, top_p, min_p)
  return posttrain.generate.answers(loaded, ids, max_tokens, sampling, seed)


def export(
  checkpoint: str,
  folder: str,
  *,
  format: str = 'hf',
  like: str | None = None,
  dtype: str | None = None,
) -> None:
  """Writes a policy as a HuggingFace directory or a PEFT adapter.

  Args:
    checkpoint: a workdir, or a stage's or a step's folder.
    folder: a new or empty folder.
    format: 'hf' (a LoRA is merged), or 'peft' (the adapter of a LoRA stage).
    like: a HuggingFace directory: the template of hf, the base model of peft.
    dtype: of all tensors of hf, without `like`.

  Raises:
    ValueError: there is no such checkpoint, it holds no adapter (peft), the
      folder is not empty, or no HuggingFace architecture fits this model.
  """
  posttrain.export.export(
    posttrain.export.Flags(
      checkpoint=checkpoint,
      folder=folder,
      format=format,
      like=like,
      dtype=dtype,
    )
  )
