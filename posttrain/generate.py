"""The command for one answer of a trained policy.

    python -m posttrain.generate --checkpoint=runs/arithmetic \\
        --prompt='What is 1 + 2?'
    python -m posttrain.generate --checkpoint=runs/arithmetic --json \\
        --prompt_ids=256,87,104 --temperature=1 --max_tokens=40

Model, tokenizer and chat template come from the checkpoint or the directory.
The weights are the moving average where the checkpoint has one, as in
evaluation; a LoRA is merged.

Prints the text of the answer. With --json the last line on stdout is one JSON
object: prompt_ids, ids, logprobs (in nats, before any truncation, at the
temperature, or at 1 for temperature 0), text, stop_reason ('eos' or
'max_tokens').

Exit codes: 0 done, 1 the machine failed, 2 the command line is wrong, 130
interrupted.
"""

import dataclasses
import functools
import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from posttrain.checkpoints import policies
from posttrain.config import names
from posttrain.decode import requests
from posttrain.util import commands, watchdog

SLOTS = 32  # sequences that are decoded at a time, at most


@dataclasses.dataclass
class Flags:
  """The command line."""

  checkpoint: str = commands.checkpoint()
  prompt: str | None = commands.flag(
    None,
    "The user's message; it needs a tokenizer. A chat with a system message "
    'or tools needs posttrain.serve.',
  )
  prompt_ids: tuple[int, ...] | None = commands.flag(
    None, 'Token ids to continue, in place of --prompt; as they are.'
  )
  max_tokens: int | None = commands.flag(
    None,
    'Longest answer, in tokens.',
    if_absent="the stage's eval.max_tokens, or 256",
    least=1,
  )
  temperature: float = commands.flag(
    0.0, 'Sampling temperature; 0 takes the most likely token.', least=0
  )
  top_k: int = commands.flag(
    0, 'Keeps the k most likely tokens; 0 keeps all.', least=0
  )
  top_p: float = commands.flag(
    1.0, 'Keeps the most likely tokens whose probabilities reach this sum.'
  )
  min_p: float = commands.flag(
    0.0, 'Keeps tokens this probable relative to the most likely one.'
  )
  seed: int = commands.flag(
    0,
    'The seed of sampling; equal seeds give equal answers.',
    least=0,
    most=2**31 - 1,
  )
  template_variables: str = commands.flag(
    '{}',
    'Variables of the chat template, a JSON object such as '
    '\'{"enable_thinking": false}\'; for directories, as a run has its own.',
    value='JSON',
  )
  compilation_cache: str | None = commands.compilation_cache()
  json: bool = commands.flag(False, 'Prints a line of JSON after the text.')

  def __post_init__(self):
    if (self.prompt is None) == (self.prompt_ids is None):
      raise ValueError('--prompt=TEXT or --prompt_ids=1,2,3 must be given')


PARSER = commands.Parser(Flags, __doc__, names.flag)


@dataclasses.dataclass(frozen=True)
class Answer:
  """A sampled answer."""

  text: str
  stop_reason: str  # 'eos' or 'max_tokens'
  ids: np.ndarray  # i32[T]
  # f32[T], nats, of the untruncated law, at the temperature (at 1 for 0).
  logprobs: np.ndarray
  prompt_ids: np.ndarray  # i32[P]


def answer(flags: Flags) -> dict[str, Any]:
  """Loads the policy and samples an answer; returns the object of --json.

  Raises:
    ValueError: the checkpoint cannot be used, or the prompt does not fit it.
  """
  sampling = requests.Sampling(
    flags.temperature, flags.top_k, flags.top_p, flags.min_p
  )
  policy = policies.load(
    flags.checkpoint,
    text=flags.prompt is not None,
    variables=flags.template_variables,
    cache=flags.compilation_cache,
  )
  if flags.prompt is not None:
    ids = policy.ids([{'role': 'user', 'content': flags.prompt}])
  else:
    ids, size = np.array(flags.prompt_ids, np.int32), policy.model.vocab_size
    if not ((ids >= 0) & (ids < size)).all():
      raise ValueError(f'--prompt_ids must be in [0, {size}): got {ids}')
  (result,) = answers(policy, [ids], flags.max_tokens, sampling, flags.seed)
  return {
    name: value.tolist() if isinstance(value, np.ndarray) else value
    for name, value in vars(result).items()
  }


@watchdog.phase('decode', first=True)
def answers(
  policy: policies.Policy,
  prompts: Sequence[np.ndarray],
  max_tokens: int | None,
  sampling: requests.Sampling,
  seed: int,
) -> list[Answer]:
  """Samples an answer to each prompt.

  Args:
    policy: the policy.
    prompts: i32[P] each, ids to continue.
    max_tokens: longest answer, in tokens; None = as in its stage's evaluation.
    sampling: temperature and truncation.
    seed: answer i has the uniforms of (seed, i), whatever the other prompts.

  Raises:
    ValueError: a prompt does not fit the policy.
  """
  # Imported here so that command-line mistakes are reported without jax.
  from posttrain import sharding
  from posttrain.decode import engines

  slots = max(1, min(len(prompts), SLOTS))
  options = engines.Options(slots, seed=seed)
  engine = engines.Engine(policy.model, options, sharding.one_device())
  engine.set_params(policy.params, 0)
  completions = engine.generate(
    [
      requests.Request(
        id=i,
        ids=ids,
        max_tokens=max_tokens or policy.max_tokens,
        stop_ids=policy.stop_ids,
        sampling=sampling,
      )
      for i, ids in enumerate(prompts)
    ]
  )
  return [
    Answer(
      text=policy.text(completion.ids.tolist()),
      stop_reason=completion.stop_reason,
      ids=completion.ids,
      logprobs=completion.logprobs,
      prompt_ids=ids,
    )
    for ids, completion in zip(prompts, completions, strict=True)
  ]


def _run(flags: Flags) -> None:
  result = answer(flags)
  print(result['text'])
  if flags.json:
    print(json.dumps(result))


# Returns the exit code; takes the arguments, None = those of the process.
main = functools.partial(PARSER.run, _run)

if __name__ == '__main__':
  sys.exit(main())
