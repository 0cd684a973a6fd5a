"""What the processes of a run agree on, with pipes in place of devices."""

import json
import subprocess
import sys

import pytest

from posttrain import processes

# Forks a process per index, without jax; each prints what `work` returns.
WORLD = """
import json, multiprocessing, sys, threading
import numpy as np
from posttrain import processes

count, source = int(sys.argv[1]), sys.argv[2]


class Pipes:
  def __init__(self, index, pipe):
    self.count, self.index, self._pipe = count, index, pipe

  def exchange(self, row):
    self._pipe.send(row)
    return self._pipe.recv()


def run(index, pipe, results):
  scope = {'processes': processes, 'index': index, 'np': np}
  exec(source, scope)
  with processes.use(Pipes(index, pipe)):
    try:
      result = scope['work']()
    except Exception as error:
      notes = getattr(error, '__notes__', [])
      result = [type(error).__name__, ' '.join([str(error), *notes])]
  results.send(result)


fork = multiprocessing.get_context('fork')
ends = [fork.Pipe() for _ in range(count)]
outs = [fork.Pipe() for _ in range(count)]
for i in range(count):
  args = i, ends[i][1], outs[i][1]
  fork.Process(target=run, args=args, daemon=True).start()


def serve():
  while True:
    rows = [end.recv() for end, _ in ends]
    assert len({(row.shape, row.dtype) for row in rows}) == 1, 'equal rows'
    for end, _ in ends:
      end.send(np.stack(rows))


threading.Thread(target=serve, daemon=True).start()
print(json.dumps([out.recv() for out, _ in outs]))
assert 'jax' not in sys.modules
"""


def _world(count, source):
  """Returns what `work()` of `source` returns in each of the processes."""
  done = subprocess.run(
    [sys.executable, '-c', WORLD, str(count), source],
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout)


def test_one_process_shares_nothing():
  assert processes.count() == 1 and processes.is_first()
  assert processes.gather({'a': 1}) == [{'a': 1}]
  assert processes.on(5, lambda: 'x') == 'x'
  assert processes.any_of(True) and not processes.any_of(False)
  calls = []
  result = processes.divided([3, 4], lambda x: calls.append(x) or x, key=int)
  assert result == [3, 4] and calls == [[3, 4]]
  with pytest.raises(KeyError):
    processes.attempt(lambda: {}['a'])


def test_values_of_any_size_reach_all():
  """Rows are of one size although the values are not."""
  lengths = _world(
    3,
    'def work(): return [len(x) for x in processes.gather("x" * 9**(index*3))]',
  )
  assert lengths == [[1, 729, 531441]] * 3


@pytest.mark.parametrize('count', [2, 5])
def test_shares_are_disjoint_and_in_order(count):
  """Neighbours with equal keys are played by one process."""
  source = """
def work():
  mine = []
  def play(items):
    mine.extend(items)
    return [x * 10 for x in items]
  items = [0, 1, 2, 10, 11, 20, 30, 31, 32, 40]
  return processes.divided(items, play, key=lambda x: x // 10), mine
"""
  results = _world(count, source)
  items = [0, 1, 2, 10, 11, 20, 30, 31, 32, 40]
  assert all(whole == [x * 10 for x in items] for whole, _ in results)
  shares = [share for _, share in results]
  assert sorted(x for share in shares for x in share) == items
  keys = [key for share in shares for key in {x // 10 for x in share}]
  assert sorted(keys) == [0, 1, 2, 3, 4]
  assert max(map(len, shares)) < len(items)


def test_work_before_an_exchange_may_end_in_any_order():
  """Processes finish different tasks first; all raise the first one's error."""
  source = """
from posttrain.rollout import side_by_side

def play(name, own, late):
  for _ in range(late):
    yield ()
  if (index, name) in FAILS:
    raise ValueError(name)
  return [f'{name}{x}' for x in own]

def work():
  items = {'a': [0, 1, 2], 'b': [3, 4]}
  shares = {k: processes.share(v, key=int) for k, v in items.items()}
  late = {'a': 3 * index, 'b': 3 - 3 * index}
  results = side_by_side.run([play(k, shares[k], late[k]) for k in items])
  return [
    processes.divided(v, lambda _, result=result: result.result(), key=int)
    for v, result in zip(items.values(), results)
  ]
"""
  whole = [['a0', 'a1', 'a2'], ['b3', 'b4']]
  assert _world(2, f'FAILS = []{source}') == [whole] * 2
  failed = _world(2, f"FAILS = [(0, 'b'), (1, 'a')]{source}")
  assert failed[0] == failed[1] and failed[0][0] == 'ValueError'
  assert failed[0][1].startswith('a (process 1 ')


def test_a_failure_of_one_is_raised_in_all():
  """The lowest failing process is named, of its type and text."""
  source = """
def work():
  def fail():
    if index:
      raise ValueError(f'bad {index}')
  return processes.attempt(fail)
"""
  results = _world(3, source)
  assert len({tuple(x) for x in results}) == 1
  kind, text = results[0]
  assert kind == 'ValueError' and text.startswith('bad 1 (process 1 on ')


def test_an_error_that_cannot_be_sent_keeps_its_text():
  source = """
class Odd(ValueError):
  def __init__(self, a, b):
    super().__init__(f'{a} and {b}')


def work():
  def fail():
    raise Odd('this', 'that')
  return processes.on(1, fail)
"""
  for kind, text in _world(2, source):
    assert kind == 'ValueError' and 'this and that (process 1 on ' in text


def test_errors_keep_type_and_attributes():
  """Also those whose constructor takes more than a text."""
  source = """
from posttrain.metrics import statistics


def work():
  def fail():
    if index == 1:
      raise statistics.TooManyErrors('too many', ('a', 'b'))
  try:
    processes.attempt(fail)
  except statistics.TooManyErrors as error:
    return [str(error), list(error.errors)]
"""
  assert _world(2, source) == [['too many', ['a', 'b']]] * 2


def test_one_calls_and_all_get_the_result():
  source = """
def work():
  calls = []
  value = processes.on(4, lambda: calls.append(index) or f'from {index}')
  return value, calls
"""
  values, calls = zip(*_world(3, source), strict=True)
  assert set(values) == {'from 1'}  # 4 modulo 3
  assert calls == ([], [1], [])


def test_a_flag_of_one_stops_all():
  source = 'def work(): return processes.any_of(index == 2)'
  assert _world(3, source) == [True] * 3


def test_results_that_cannot_be_sent_stay():
  source = """
def work():
  return processes.together(lambda: lambda: index)()
"""
  assert _world(2, source) == [0, 1]
