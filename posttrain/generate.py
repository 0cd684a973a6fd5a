"""Asks a trained policy.

    python -m posttrain.generate --checkpoint=PATH
        (--prompt=TEXT | --prompt_ids=1,2,3) [--max_tokens=N]
        [--temperature=T] [--top_k=N] [--top_p=P] [--min_p=P] [--seed=N]
        [--json]

PATH is a run's workdir, one of its checkpoints/<stage> folders, or one step's;
or a HuggingFace or PEFT directory. Model, tokenizer and chat template are what
the checkpoint, or the directory, says of itself. The weights are their moving
average where a checkpoint has one, which is what evaluation measured; else
those that were trained, and a LoRA is merged into what it corrects.

--prompt is asked as a user's message; --prompt_ids go in as they are, and need
no tokenizer. The answer is greedy (--temperature=0) unless told otherwise, and
as long as those of the stage's evaluation, or 256 tokens; the same --seed
(default 0) draws the same answer. --template_variables='{"enable_thinking":
false}' is shown to a directory's chat template; a run has its own.

Prints the text. With --json the last line on stdout is one object: prompt_ids,
ids, logprobs (in nats, at the temperature, or at 1 where it is 0; before any
truncation), text, stop_reason ('eos' or 'max_tokens'). Exit codes: 0 done, 2
the command is wrong, 130 interrupted.
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from posttrain.checkpoints import policies
from posttrain.decode import requests
from posttrain.util import errors


@dataclasses.dataclass
class Flags:
  """The command line."""

  checkpoint: str = ''
  prompt: str | None = None
  prompt_ids: tuple[int, ...] | None = None
  max_tokens: int | None = None  # None = as in the stage's evaluation, or 256
  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  seed: int = 0
  template_variables: str = '{}'
  json: bool = False

  @property
  def sampling(self) -> requests.Sampling:
    return requests.Sampling(
      self.temperature, self.top_k, self.top_p, self.min_p
    )


def _ids(text: str) -> tuple[int, ...]:
  return tuple(int(part) for part in text.split(','))


_READERS: dict[str, tuple[Callable[[str], Any], str]] = {
  'checkpoint': (str, 'a path'),
  'prompt': (str, 'a text'),
  'prompt_ids': (_ids, 'whole numbers with commas between them'),
  'max_tokens': (int, 'a whole number'),
  'temperature': (float, 'a number'),
  'top_k': (int, 'a whole number'),
  'top_p': (float, 'a number'),
  'min_p': (float, 'a number'),
  'seed': (int, 'a whole number'),
  'template_variables': (str, 'a JSON object'),
}


def parse(argv: Sequence[str]) -> Flags:
  """Reads the command line; ValueError names the argument that is wrong."""
  flags = Flags()
  for argument in argv:
    name, equals, text = argument.removeprefix('--').partition('=')
    if argument in ('--json', '--json=true', '--json=false'):
      flags.json = text != 'false'
      continue
    if not argument.startswith('--') or name not in _READERS or not equals:
      expected = ', '.join(f'--{known}=...' for known in _READERS)
      raise ValueError(
        f'arguments must be {expected} or --json: got {argument!r}'
      )
    read, what = _READERS[name]
    try:
      setattr(flags, name, read(text))
    except ValueError:
      raise ValueError(f'--{name} must be {what}: got {text!r}') from None
  _check(flags)
  return flags


def _check(flags: Flags) -> None:
  """Refuses what can be seen to be wrong without a look at the checkpoint."""
  if not flags.checkpoint:
    raise ValueError('--checkpoint=PATH must be given')
  if (flags.prompt is None) == (flags.prompt_ids is None):
    got = 'neither' if flags.prompt is None else 'both'
    raise ValueError(
      f'one of --prompt=TEXT and --prompt_ids=1,2,3 must be given: got {got}'
    )
  if flags.max_tokens is not None and flags.max_tokens < 1:
    raise ValueError(f'--max_tokens must be > 0: got {flags.max_tokens}')
  if not 0 <= flags.seed < 2**31:
    raise ValueError(f'--seed must be in [0, 2**31): got {flags.seed}')
  if not np.isfinite(flags.temperature):
    raise ValueError(f'--temperature must be finite: got {flags.temperature}')
  flags.sampling  # noqa: B018 - checks itself


def prompt_of(flags: Flags, policy: policies.Policy) -> np.ndarray:
  """The ids to continue: i32[P].

  Raises:
    ValueError: an id is not in the vocabulary.
  """
  if flags.prompt_ids is None:
    if policy.renderer is None:
      raise ValueError(
        f'--prompt_ids must be given: {flags.checkpoint} has no '
        'tokenizer.json to read a --prompt by'
      )
    message = {'role': 'user', 'content': flags.prompt}
    return policy.renderer.render([message], add_generation_prompt=True).ids
  size = policy.model.vocab_size
  wrong = [i for i in flags.prompt_ids if not 0 <= i < size]
  if wrong:
    raise ValueError(
      f'--prompt_ids must be in [0, {size}), the vocabulary: got {wrong[0]}'
    )
  return np.array(flags.prompt_ids, np.int32)


def answer(flags: Flags) -> dict[str, Any]:
  """Loads the policy and lets it answer; returns what --json prints."""
  # Late, so that a mistake in the command line is answered at once.
  from posttrain.decode import engine as engines

  policy = policies.load(
    flags.checkpoint,
    text=flags.prompt is not None,
    variables=flags.template_variables,
  )
  prompt = prompt_of(flags, policy)
  engine = engines.Engine(policy.model, slots=1, seed=flags.seed)
  engine.set_params(policy.params, 0)
  (completion,) = engine.generate(
    [
      requests.Request(
        id=0,
        ids=prompt,
        max_tokens=flags.max_tokens or policy.max_tokens,
        stop_ids=policy.stop_ids,
        sampling=flags.sampling,
      )
    ]
  )
  ids = completion.ids.tolist()
  return {
    'prompt_ids': prompt.tolist(),
    'ids': ids,
    'logprobs': completion.logprobs.tolist(),
    'text': policy.text(ids),
    'stop_reason': completion.stop_reason,
  }


def main(argv: Sequence[str]) -> int:
  """Returns the exit code."""
  if '--help' in argv:
    print(__doc__)
    return 0
  try:
    flags = parse(argv)
    said = answer(flags)
  except KeyboardInterrupt:
    return 130
  except ValueError as error:
    return errors.report(error)
  print(said['text'])
  if flags.json:
    print(json.dumps(said))
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
