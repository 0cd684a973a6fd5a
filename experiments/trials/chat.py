"""Faults of chats: hostile templates and tokenizer files, long conversations.

All but two commands are in this process, or in one process with bounded memory:

    python -m experiments.trials.chat templates|files
"""

import itertools
import json
import os
import pathlib
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator

from experiments.trials import base, chat_templates
from posttrain import schema
from posttrain.chat import (
  finder,
  layout,
  renderer,
  spans,
  templates,
  tokenizers,
)

FOLDER = base.ROOT / 'tests' / 'chat' / 'templates'
DAY = {'today': '2025-01-31'}
DATED = {'granite3_3': DAY, 'llama3_2': DAY}
_MEMORY = 3 * 2**30  # of the process with the hostile inputs
_SLOWEST = 2  # seconds of processor time for one of them
_WAIT = 0.5  # seconds between two looks at whether a client has left
_PEAK = {'templates': 200, 'files': 400}  # MB of the process


def _tokenizer(**changes) -> bytes:
  """Returns the byte tokenizer's file, with other values at dotted paths."""
  value = json.loads(tokenizers.Bytes().content)
  for path, new in changes.items():
    *keys, last = path.split('.')
    place = value
    for key in keys:
      place = place[key]
    place[last] = new
  return json.dumps(value).encode()


def _added(**token) -> bytes:
  tokens = json.loads(tokenizers.Bytes().content)['added_tokens']
  return _tokenizer(added_tokens=[*tokens, {**tokens[0], **token}])


def _replaces(string: str, content: str) -> dict:
  pattern = {'String': string}
  return {'type': 'Replace', 'pattern': pattern, 'content': content}


def _files() -> dict[str, bytes]:
  """Returns tokenizer files that must be refused."""
  return {**_models(), **_added_tokens(), **_steps()}


def _models() -> dict[str, bytes]:
  """Returns files that are no JSON, or have another model or vocabulary."""
  whole = _tokenizer()
  return {
    'empty': b'',
    'binary': bytes(range(256)) * 10,
    'half': whole[:3000],
    'deep': b'[' * 100_000,
    'deep objects': b'{"a":' * 5000 + b'1' + b'}' * 5000,
    'a list': b'[]',
    'a key twice': b'{"model": 1, "model": 2}',
    'no model': _tokenizer(model=None),
    'no vocabulary': _tokenizer(**{'model.vocab': {}}),
    'a list as vocabulary': _tokenizer(**{'model.vocab': [1, 2]}),
    'an id of 10^12': _tokenizer(**{'model.vocab.a': 10**12}),
    'an id of 2^32 - 1': _tokenizer(**{'model.vocab.a': 2**32 - 1}),
    'a negative id': _tokenizer(**{'model.vocab.a': -1}),
    'a text as id': _tokenizer(**{'model.vocab.a': 'x'}),
    'an id twice': _tokenizer(**{'model.vocab.a': 5}),
    'another model': _tokenizer(**{'model.type': 'Foo'}),
    'merges of numbers': _tokenizer(**{'model.merges': [[1, 2]]}),
    'unknown merges': _tokenizer(**{'model.merges': [['q1', 'q2']]}),
    'random ids': _tokenizer(**{'model.dropout': 0.5}),
  }


def _added_tokens() -> dict[str, bytes]:
  return {
    'added: negative': _added(content='<z>', id=-5),
    'added: 10^12': _added(content='<z>', id=10**12),
    'added: 2^32 - 1': _added(content='<z>', id=2**32 - 1),
    'added: 10^400': _added(content='<z>', id=10**400),
    'added: a gap': _added(content='<z>', id=5000),
    'added: an id twice': _added(content='<z>', id=256),
    'added: a text twice': _added(content='<|end|>', id=300),
    'added: a number': _added(content=5),
    'added: empty': _added(content=''),
    'added: a text': _tokenizer(added_tokens=['x']),
  }


def _steps() -> dict[str, bytes]:
  """Returns files whose normalizer, decoder and so on do too much."""
  sequence = {'type': 'Sequence', 'normalizers': [_replaces('a', 'aa')] * 40}
  template = {
    'type': 'TemplateProcessing',
    'single': [{'SpecialToken': {'id': '<z>', 'type_id': 0}}],
    'pair': [],
    'special_tokens': {},
  }
  text = {'Sequence': {'id': 'A', 'type_id': 0}}
  repeats = {**template, 'single': [text] * 1000}
  token = {'id': '<z>', 'ids': [0] * 10**6, 'tokens': ['<z>'] * 10**6}
  adds = {**template, 'special_tokens': {'<z>': token}}
  regex = {'type': 'Split', 'behavior': 'Isolated', 'invert': False}
  regex['pattern'] = {'Regex': '(a|aa)+$'}
  return {
    'a normalizer that grows': _tokenizer(normalizer=sequence),
    'a normalizer of nothing': _tokenizer(normalizer=_replaces('', 'aa')),
    'a decoder of nothing': _tokenizer(decoder=_replaces('', 'aa')),
    'a charsmap of 4 GB': _tokenizer(
      normalizer={'type': 'Precompiled', 'precompiled_charsmap': '/////w=='}
    ),
    'a post-processor': _tokenizer(post_processor=template),
    'a text many times': _tokenizer(post_processor=repeats),
    'ids many times': _tokenizer(post_processor=adds),
    'a regex': _tokenizer(pre_tokenizer=regex),
    'no length': _tokenizer(pre_tokenizer={'type': 'FixedLength', 'length': 0}),
    'no decoder': _tokenizer(
      decoder={'type': 'Strip', 'content': 'a', 'start': 9**9, 'stop': 9**9}
    ),
  }


def _render(source: str) -> None:
  templates.Jinja(source, DAY).text([{'role': 'user', 'content': 'hi'}])


def _tokenize(content: bytes, folder: str) -> None:
  path = pathlib.Path(folder) / 'tokenizer.json'
  path.write_bytes(content)
  chat = renderer.load(schema.Tokenizer(path=str(path), eos='<|end|>'))
  ids = chat.render([{'role': 'user', 'content': 'a' * 60 + '!'}]).ids
  chat.tokenizer.decode(ids.tolist())


def _refusals(kind: str) -> Iterator[dict]:
  """Yields how each hostile input ended."""
  with tempfile.TemporaryDirectory() as folder:
    inputs = chat_templates.TEMPLATES if kind == 'templates' else _files()
    for name, hostile in inputs.items():
      begin, error = time.process_time(), 'nothing: it was taken'
      try:
        if isinstance(hostile, str):
          _render(hostile)
        else:
          _tokenize(hostile, folder)
      except ValueError as refusal:
        error = str(refusal)
      except BaseException as fault:
        error = f'{type(fault).__name__}\n{fault}'[:300]
      yield {
        'name': name,
        'error': error,
        'seconds': time.process_time() - begin,
      }


def _refused(kind: str, named: str) -> str:
  done = base.command('experiments.trials.chat', kind, timeout=300)
  assert done.code == 0, f'exit {done.code}: {done.err[-900:]}'
  *rows, peak = map(json.loads, done.out.splitlines())
  for row in rows:
    error, name = row['error'], row['name']
    assert '\n' not in error and len(error) < 1500, f'{name}: {error[:300]}'
    assert named in error or 'tokenizer.json' in error, f'{name}: {error[:300]}'
    assert row['seconds'] < _SLOWEST, f'{name}: {row["seconds"]:.1f} s'
  assert peak < _PEAK[kind], f'{peak} MB'
  slowest = max(rows, key=lambda row: row['seconds'])
  return (
    f'{len(rows)} refused in one line each; the slowest, {slowest["name"]!r}, '
    f'after {slowest["seconds"]:.1f} s of processor time; {peak} MB at most'
  )


@base.trial('chat', 'a hostile template is refused, within time and memory')
def hostile_templates(scratch: base.Scratch) -> str:
  del scratch
  return _refused('templates', 'config.tokenizer.chat_template')


# What operations take most time for what they pay: each is repeated until it
# is refused.
_TEXTS = (
  "{% set a = 'a' * 2499 %}{% set n = 'a' * 624 + 'b' + 'a' * 625 %}"
  "{% set long = 'a' * 1000000 %}{% set e = '\U0001f600' * 4000 %}"
  "{% set m = 'a' * 300000 + 'b' + 'a' * 300000 %}{% set w = 'é' * 4000 %}"
)
_SEARCHES = (
  *('n in a', 'n not in a', f"n in '{'a' * 2499}'", 'n in a in [1]'),
  *('n is in a', "[n] | select('in', a) | first", 'm in long', "'b' in a"),
  *('a.find(n)', 'a.rfind(n)', 'a.count(n)', 'a.split(n)', 'a.rsplit(n)'),
  *('a.partition(n)', "a.replace(n, 'c')", "a | replace(new='c', old=n)"),
  *('a | trim(n)', 'long.find(n)', 'long.rfind(n)', 'long.strip(n)'),
)
_OTHERS = (
  *('w.swapcase()', 'w | upper', 'w is upper', 'e.title()', "[e] ~ ''"),
  *("'%r' % (e,)", '[e] | string', 'e | tojson(true)', 'e | urlencode'),
  *("('\n' * 4000) | indent", "('a ' * 2000) | title", 'e | list | sort'),
  *('[1] | attr("x")', 'messages.x', 'namespace(a=1)', 'range(9) | list'),
)


@base.trial('chat', 'each operation of a template pays for its time')
def prices(scratch: base.Scratch) -> str:
  """Measures how long the budget of a rendering lasts, and a client waits."""
  del scratch
  seconds, waits = {}, {}
  loop = '{% for i in range(100000) %}'
  for name in (*_SEARCHES, *_OTHERS, '1 in loop'):
    body = '{% set x = (' + name + ') %}{% endfor %}{% endfor %}'
    chat = renderer.Renderer(tokenizers.Bytes(), _TEXTS + loop * 2 + body)
    looks = [time.process_time()]

    def left(looks=looks) -> bool:
      looks.append(time.process_time())
      return False

    try:
      chat.prompt([{'role': 'user', 'content': 'hi'}], left)
    except ValueError as error:
      assert 'must render within the limits' in str(error), f'{name}: {error}'
    seconds[name] = time.process_time() - looks[0]
    waits[name] = max(b - a for a, b in itertools.pairwise(looks))
  *_, (slowest, most) = sorted(seconds.items(), key=lambda item: item[1])
  *_, (waited, wait) = sorted(waits.items(), key=lambda item: item[1])
  assert most < _SLOWEST, f'{slowest!r}: {most:.1f} s'
  assert wait < _WAIT, f'{waited!r}: {wait:.2f} s between two looks'
  median = statistics.median(seconds.values())
  return (
    f'{len(seconds)} operations repeated until they were refused: after '
    f'{median:.2f} s, the slowest, {slowest!r}, after {most:.2f} s of '
    f'processor time; {wait:.3f} s at most between two looks at the client'
  )


@base.trial('chat', 'a hostile tokenizer.json is refused in one line')
def hostile_files(scratch: base.Scratch) -> str:
  del scratch
  return _refused('files', 'config.tokenizer.path')


def _jinja(name: str) -> templates.Jinja:
  tokens = json.loads((FOLDER / 'tokens.json').read_text())[name]
  special = {key: tokens[key] for key in ('bos_token', 'eos_token')}
  source = (FOLDER / f'{name}.jinja').read_text()
  return templates.Jinja(source, {**special, **DATED.get(name, {})})


def _talk(count: int, thoughts: bool, empty: bool) -> list[dict]:
  talk = []
  for i in range(count):
    role, content = ('user', 'assistant')[i % 2], f'text {i}'
    if thoughts and role == 'assistant':
      content = f'<think>\nso {i}\n</think>\n\n{content}'
    talk.append({'role': role, 'content': '' if empty else content})
  return talk


@base.trial('chat', 'rendering a chat is linear in its messages', alone=True)
def linear(scratch: base.Scratch) -> str:
  del scratch
  cases = {
    'built-in': (None, False, False),
    'built-in, empty': (None, False, True),
    'llama3_1': ('llama3_1', False, False),
    'qwen3 with thoughts': ('qwen3', True, False),
  }
  curves = []
  for case, (name, thoughts, empty) in cases.items():
    chat = renderer.Renderer(
      tokenizers.Bytes(),
      name and (FOLDER / f'{name}.jinja').read_text(),
      variables={'bos_token': '<s>'} if name else None,
    )
    costs = {}
    for count in (10, 100, 1000, 10_000):
      if name == 'qwen3' and count == 10_000:
        count = 3000
      talk, best = _talk(count, thoughts, empty), float('inf')
      for _ in range(3):  # collections of garbage fall into some
        begin = time.process_time()
        chat.render(talk, add_generation_prompt=True)
        best = min(best, time.process_time() - begin)
      costs[count] = best / count * 1e6
    curve = ', '.join(f'{n}: {cost:.0f}' for n, cost in costs.items())
    curves.append(f'{case} {curve}')
    *_, before, last = costs.values()
    assert last < 2.5 * before, f'{case}: microseconds per message {curve}'
  return 'microseconds per message: ' + '; '.join(curves)


_CONTENTS = (
  *(
    '',
    ' ',
    '\n',
    'hi',
    'It is 2.',
    ' so ',
    'a',
    '<|im_end|>',
    '</s>',
    '[INST]',
  ),
  *('<think>\nhm\n</think>\n\nyes', '<think>\nwell\n</think>\n\n', '</think>'),
  *('<tool_response>\n7\n</tool_response>', '\uf8ffcontent0\uf8ff', '\uf8ff'),
)


def _random_talk(draw: random.Random) -> tuple[dict, ...]:
  roles = draw.choice((('user', 'assistant'), ('assistant', 'tool', 'user')))
  turns = itertools.cycle(roles)
  return tuple(
    {
      'role': next(turns),
      'content': ''.join(draw.choices(_CONTENTS, k=draw.choice((1, 1, 2)))),
    }
    for _ in range(draw.randint(1, 14))
  )


@base.trial('chat', 'contents and turns are where single renderings find them')
def places(scratch: base.Scratch) -> str:
  """Compares with the definition: a rendering per content and per turn."""
  del scratch
  names = json.loads((FOLDER / 'tokens.json').read_text())
  chats = {name: _jinja(name) for name in names}
  draw, compared, quick = random.Random(0), 0, 0
  end = time.process_time() + 3
  while time.process_time() < end:
    talk, prompt = _random_talk(draw), draw.random() < 0.5
    for name, chat in chats.items():
      try:
        text = chat.text(talk, prompt)
        expected = [
          spans.one(chat, talk, i, text, prompt=prompt)
          for i in range(len(talk))
        ]
      except ValueError:
        continue  # a template that refuses these roles or hides a content
      work = spans.Work(talk, text)
      places = finder.find(chat, talk, text, prompt=prompt, start=0, work=work)
      assert [(a, b) for a, b, _ in places] == expected, f'{name}: {talk}'
      quick += sum(span.kind != 'alone' for span in places)
      compared += len(talk)
      pieces = layout.pieces(chat, talk, text, prompt=prompt)
      assert ''.join(piece.text for piece in pieces) == text
  return (
    f'{compared} contents under {len(chats)} templates at their places; '
    f'{quick / compared:.0%} without a rendering of their own'
  )


@base.trial('chat', "a text with the renderer's own mark is rendered")
def marks(scratch: base.Scratch) -> str:
  del scratch
  names = json.loads((FOLDER / 'tokens.json').read_text())
  contents = ('\uf8ffcontent\uf8ff', '\uf8ffcontent0\uf8ff', '\uf8ff' * 9)
  for name in names:
    chat = _jinja(name)
    talk = [
      {'role': ('user', 'assistant')[i % 2], 'content': content}
      for i, content in enumerate(contents)
    ]
    text = chat.text(talk)
    pieces = layout.pieces(chat, talk, text, prompt=False)
    shown = tuple(piece.text for piece in pieces if piece.is_content)
    assert shown == contents, f'{name}: {shown}'
  return f'{len(names)} templates, {len(contents)} contents each'


@base.trial('chat', 'commands name the template, file or option they refuse')
def commands(scratch: base.Scratch) -> str:
  template, file = scratch.folder / 'deep.jinja', scratch.folder / 'x.json'
  template.write_text(chat_templates.TEMPLATES['parentheses'])
  file.write_bytes(os.urandom(3000))
  for option, value, named in (
    ('chat_template', template, 'config.tokenizer.chat_template'),
    ('path', file, file.name),
  ):
    done = base.command(
      'posttrain.main',
      f'--config={base.TINY}',
      f'--workdir={scratch.folder / "run"}',
      f'--config.tokenizer.{option}={value}',
      '--dry_run',
    )
    base.expect_line(done, 2, named)
  return 'exit 2, one line: deep parentheses, a binary tokenizer.json'


def main(kind: str) -> None:
  """Prints how the hostile inputs end, and the memory that was used."""
  resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
  for row in _refusals(kind):
    print(json.dumps(row), flush=True)
  status = pathlib.Path('/proc/self/status').read_text()
  print(int(status.partition('VmHWM:')[2].split()[0]) >> 10)


if __name__ == '__main__':
  main(sys.argv[1])
