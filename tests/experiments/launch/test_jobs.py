"""Sweeps: their values, names, workdirs and commands; types of TPU slices."""

import pytest

from experiments.launch import jobs, tpus


@pytest.mark.parametrize(
  ('text', 'values'),
  [
    ('1e-4,3e-4', ('1e-4', '3e-4')),
    ('{"a": [1, 2]},{"a": "},{"}', ('{"a": [1, 2]}', '{"a": "},{"}')),
    ("don't,won't", ("don't", "won't")),
  ],
)
def test_commas_within_brackets_and_quotes_belong_to_a_value(text, values):
  assert jobs.parse_sweep(f'grpo.optim.lr={text}') == ('grpo.optim.lr', values)


@pytest.mark.parametrize('text', ['seed', 'seed=1,2,1', 'seed=(1,2'])
def test_a_sweep_without_a_key_or_a_value_is_refused(text):
  with pytest.raises(ValueError, match='^--sweep must '):
    jobs.parse_sweep(text)


def test_several_sweeps_give_all_combinations_in_order():
  found = jobs.expand(
    'c.py', [('seed', '7')], ['grpo.optim.lr=1e-4,3e-4', 'sft.steps=5,6'], 'w'
  )
  names = [f'lr={lr}_steps={n}' for lr in ('1e-4', '3e-4') for n in (5, 6)]
  assert [job.name for job in found] == names
  last = found[-1]
  assert last.workdir == f'w/{names[-1]}'
  assert last.swept == (('grpo.optim.lr', '3e-4'), ('sft.steps', '6'))
  assert last.overrides == (('seed', '7'), *last.swept)


@pytest.mark.parametrize(
  ('overrides', 'sweeps'),
  [([], ['seed=1', 'seed=2']), ([('seed', '0')], ['seed=1,2'])],
)
def test_a_key_that_is_set_twice_is_refused(overrides, sweeps):
  with pytest.raises(ValueError, match='--sweep=seed must be the only value'):
    jobs.expand('c.py', overrides, sweeps, 'w')


@pytest.mark.parametrize(
  ('codes', 'again'),
  [([75], True), ([5, -9], True), ([0], False), ([5, 1], False)],
)
def test_a_run_that_saved_or_lost_a_process_starts_again(codes, again):
  assert jobs.starts_again(codes) is again


@pytest.mark.parametrize(
  ('name', 'topology', 'hosts', 'chips'),
  [('v5litepod-16', '4x4', 4, 4), ('v5p-128', '4x4x4', 16, 4)],
)
def test_a_slice_has_as_many_chips_as_its_topology(
  name, topology, hosts, chips
):
  found = tpus.find(name)
  assert (found.topology, found.hosts) == (topology, hosts)
  assert found.chips_per_host == chips
