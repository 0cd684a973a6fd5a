"""Configs and checkpoints from elsewhere: what they name is not taken."""

import dataclasses
import json
import os
import pathlib
import zlib
from typing import Any

from experiments.trials import base, many
from posttrain import schema
from posttrain.util import exits

# Each would leave a file named `taken`, or is defined elsewhere.
GADGETS = (
  'bomb:f',
  'bomb:os.system',
  'subprocess:getoutput',
  'posttrain.util.imports:importlib.import_module',
  'posttrain.rewards.numeric:re.sub',
  'posttrain.main:main',
  'posttrain.util.imports:load',
  'posttrain.envs.__main__:main',
  'posttrain.algorithms:make',
  'configs.arithmetic:get_config',
  'configs.machinery:os.system',
  'experiments.faults:main',
)
FEATURES = 'tensorflow_datasets.core.features'
BOMB = """
import pathlib
pathlib.Path(__file__).with_name('taken').touch()
import os
def f(completions, a=0, **kwargs): return [0.5 for _ in completions]
"""


def bomb(scratch: base.Scratch) -> dict[str, str]:
  """Writes a module that leaves a trace when it is imported; returns paths."""
  folder = scratch.folder / 'modules'
  folder.mkdir()
  (folder / 'bomb.py').write_text(BOMB)
  state = scratch.folder / 'state'  # of a user who has trained nothing
  paths = f'{base.ROOT}{os.pathsep}{folder}'
  return {'PYTHONPATH': paths, 'XDG_STATE_HOME': str(state)}


def taken(scratch: base.Scratch) -> bool:
  """Returns whether the module was imported."""
  return (scratch.folder / 'modules/taken').exists()


def reward(values: dict[str, Any], fn: str) -> dict[str, Any]:
  """Returns a config with a reward function in its stage on rewards."""
  values = json.loads(json.dumps(values))
  entry = values['grpo']['envs']['arithmetic']
  entry['rewards'] = {'x': dataclasses.asdict(schema.RewardFn(fn))}
  return values


def forge(workdir: pathlib.Path, change) -> None:
  """Changes the `host` item of the run's last step, with a right checksum."""
  metadata = workdir / 'checkpoints/grpo/2/host/metadata'
  record = json.loads(metadata.read_text())
  del record['crc']
  change(record['host'])
  text = json.dumps(record, sort_keys=True)
  metadata.write_text(json.dumps({**record, 'crc': zlib.crc32(text.encode())}))


@base.trial('trust', 'a config.json names no function that is not ours')
def config_json(scratch: base.Scratch) -> str:
  env, workdir = bomb(scratch), scratch.finished_run()
  values = json.loads((workdir / 'config.json').read_text())
  own = 'posttrain.rewards.similarity:ratio'
  commands = []
  for i, fn in enumerate((*GADGETS, own)):
    path = scratch.folder / f'{i}.json'
    path.write_text(json.dumps(reward(values, fn)))
    commands.append([f'--config={path}', '--dry_run', *cache(scratch)])
  *refused, fine = many.run(commands, env=env)
  for fn, done in zip(GADGETS, refused, strict=True):
    base.expect_line(
      done, exits.USAGE, '--trust_config', repr(fn), 'rewards.x.fn'
    )
  # It takes no kwarg of a reward function, which is found after the trust.
  assert 'trust' not in fine.err, fine.err
  assert not taken(scratch), 'a refused module was imported'
  (done,) = many.run([[*commands[0], '--trust_config']], env=env)
  assert done.code == 0 and "'bomb:f'" in done.err, done.err
  assert taken(scratch)
  return (
    f'{len(GADGETS)} refused by name, nothing imported; taken with the flag'
  )


def cache(scratch: base.Scratch) -> list[str]:
  """Returns the override of the user's own compilation cache."""
  return [f'--config.compilation_cache={scratch.cache}']


@base.trial('trust', 'the own run resumes from its config.json unasked')
def own_run(scratch: base.Scratch) -> str:
  env, workdir = bomb(scratch), scratch.folder / 'own'
  rewards = '{"x": {"fn": "bomb:f"}}'
  argv = scratch.tiny(
    workdir,
    '--config.sft.steps=2',
    '--config.grpo.steps=1',
    f'--config.grpo.envs.arithmetic.rewards={rewards}',
  )
  done = base.command('posttrain.main', *argv, env=env)
  assert done.code == 0 and 'trust' not in done.err, done.err[-900:]
  path = workdir / 'config.json'
  again = [f'--config={path}', f'--workdir={workdir}']
  other = scratch.folder / 'other.json'
  other.write_text(
    path.read_text().replace('"kwargs": {}', '"kwargs": {"a": 1}')
  )
  same, changed = many.run([again, [f'--config={other}', '--dry_run']], env=env)
  assert same.code == 0 and 'trust' not in same.err, same.err[-900:]
  base.expect_line(changed, exits.USAGE, '--trust_config', "'bomb:f'")
  # An archive of it, unpacked by another user.
  env['XDG_STATE_HOME'] = str(scratch.folder / 'another')
  (unknown,) = many.run([again], env=env)
  base.expect_line(unknown, exits.USAGE, '--trust_config', "'bomb:f'")
  return 'resumed unasked; with another kwarg, or as another user: exit 2'


@base.trial('trust', 'a checkpoint names no code, no server and no cache')
def checkpoint(scratch: base.Scratch) -> str:
  env, workdir = bomb(scratch), scratch.finished_run()
  poison = scratch.folder / 'poison'

  def change(host):
    host['config'] = reward(host['config'], 'bomb:f')
    host['config']['compilation_cache'] = str(poison)

  forge(workdir, change)
  env['HOME'] = str(scratch.folder / 'home')
  evaluate = [f'--checkpoint={workdir}', '--config.grpo.eval.prompts=1']
  refused, trusted = many.run(
    [evaluate, [*evaluate, *cache(scratch), '--trust_config']],
    'posttrain.evaluate',
    env=env,
  )
  base.expect_line(refused, exits.USAGE, '--trust_config', "'bomb:f'")
  assert trusted.code == 0 and "'bomb:f'" in trusted.err, trusted.err[-900:]
  (scratch.folder / 'modules/taken').unlink()
  (done,) = many.run(
    [
      [
        f'--checkpoint={workdir}',
        '--prompt=1+1',
        '--max_tokens=2',
        f'--compilation_cache={scratch.cache}',
      ]
    ],
    'posttrain.generate',
    env=env,
  )
  assert done.code == 0, done.err[-900:]
  assert not taken(scratch) and not poison.exists(), 'it was taken'
  return 'evaluate: refused by name, taken with the flag; generate: ignored'


def make_data(folder: pathlib.Path) -> None:
  """Writes a TFDS data set with one column of the class `bomb.Bomb`."""
  folder.mkdir(parents=True)
  info = {'name': 'ds', 'version': '1.0.0', 'fileFormat': 'array_record'}
  (folder / 'dataset_info.json').write_text(json.dumps(info))
  features = {
    'pythonClassName': f'{FEATURES}.features_dict.FeaturesDict',
    'featuresDict': {'features': {'prompt': {'pythonClassName': 'bomb.Bomb'}}},
  }
  (folder / 'features.json').write_text(json.dumps(features))


@base.trial('trust', 'data that a config.json names run no code')
def data(scratch: base.Scratch) -> str:
  env, workdir = bomb(scratch), scratch.finished_run()
  values = json.loads((workdir / 'config.json').read_text())
  make_data(scratch.folder / 'ds/1.0.0')
  entry = values['sft']['envs']['arithmetic']
  entry['env'] = {'type': 'rows', 'path': str(scratch.folder / 'ds')}
  path = scratch.folder / 'config.json'
  path.write_text(json.dumps(values))
  other = scratch.folder / 'other.json'
  values = json.loads((workdir / 'config.json').read_text())
  values['sft']['init'] = 'gs://evil/x'
  other.write_text(json.dumps(values))
  feature, address = many.run(
    [[f'--config={x}', '--dry_run', *cache(scratch)] for x in (path, other)],
    env=env,
  )
  base.expect_line(feature, exits.USAGE, 'features.json', "'bomb.Bomb'")
  assert not taken(scratch), 'the module was imported'
  words = ('--trust_config', "config.sft.init 'gs://evil/x'")
  base.expect_line(address, exits.USAGE, *words)
  return 'a feature of a foreign class, a remote init: exit 2, named'


def set_start(host) -> None:
  """Lets an adapter start from itself."""
  host['config']['grpo']['lora']['rank'] = 2
  host['start'] = 'checkpoints/grpo/2'


# Changes of the host item: name -> (change, words of the error).
FORGED = {
  'no config': (lambda host: host.pop('config'), 'must have config.'),
  'a list': (lambda host: host.update(config=[1]), 'must have config.'),
  'no stage': (lambda host: host.update(stage='x'), 'must have config.'),
  'a model': (lambda host: host.update(model={'layers': 'x'}), 'layers'),
  'a size': (lambda host: host.update(model={'layers': 10**9}), 'layers'),
  'a tokenizer': (
    lambda host: host['config'].update(tokenizer={'path': 3}),
    'tokenizer',
  ),
  'itself': (set_start, 'must not have started from itself'),
}


@base.trial('trust', 'a forged host item is one line')
def forged(scratch: base.Scratch) -> str:
  commands = []
  for change, _ in FORGED.values():
    workdir = scratch.finished_run()
    forge(workdir, change)
    commands.append(
      [
        f'--checkpoint={workdir}',
        '--prompt=1',
        f'--compilation_cache={scratch.cache}',
      ]
    )
  results = many.run(commands, 'posttrain.generate')
  for (name, (_, words)), done in zip(FORGED.items(), results, strict=True):
    assert done.code == exits.USAGE, f'{name}: {done.code} {done.err[-600:]}'
    base.expect_line(done, exits.USAGE, words)
  return f'{len(FORGED)} kinds: exit 2, one line'
