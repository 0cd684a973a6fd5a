"""The JobSets: structure, addresses, restarts, values.

The Job in them is checked against the API's schema where kubernetes-validate is
installed.
"""

import re

import pytest
import yaml

from experiments.launch import jobs, on_gke
from posttrain.util import commands
from tests.experiments.launch import scripts


def make(**fields):
  given = {'image': 'img:1', 'claim': 'data', **fields}
  return scripts.make('gke', **given)


def load(capsys, found, options):
  """Returns the documents that a dry run prints."""
  assert on_gke.submit(found, options, dry_run=True) == 0
  lines = capsys.readouterr().out.splitlines()
  assert lines[0].startswith('kubectl apply -f - ') and lines[-1] == 'END'
  return list(yaml.safe_load_all('\n'.join(lines[1:-1])))


def job_of(document):
  (replicated,) = document['spec']['replicatedJobs']
  return replicated['template']['spec']


def container_of(document):
  (container,) = job_of(document)['template']['spec']['containers']
  return container


def expand(text, variables):
  """Replaces $(NAME) and $$ as the kubelet does, from left to right."""

  def replace(found):
    name = found[1]
    return variables.get(name, found[0]) if name is not None else '$'

  return re.sub(r'\$\$|\$\((.*?)\)', replace, text, flags=re.DOTALL)


def test_every_value_reaches_the_run_as_it_is(capsys):
  job = scripts.nasty_job()
  (document,) = load(capsys, [job], make())
  variables = {'HOME': 'no', 'echo no': 'no'}
  words = [expand(x, variables) for x in container_of(document)['command']]
  assert words == jobs.command(job, 'python3')


def test_the_processes_find_each_other(capsys):
  hosts = 16
  job = jobs.Job('LR=1e-4', 'c.py', (), (('a', 'b'),), '/data/w', hosts)
  (document,) = load(capsys, [job], make())
  spec = job_of(document)
  assert spec['completionMode'] == 'Indexed'
  assert spec['completions'] == spec['parallelism'] == hosts
  env = {x['name']: x['value'] for x in container_of(document)['env']}
  env['JOB_COMPLETION_INDEX'] = str(hosts - 1)  # Kubernetes sets it
  place = commands.place(None, None, None, env)
  assert place[1:] == (hosts, hosts - 1)
  name = document['metadata']['name']
  (role,) = (x['name'] for x in document['spec']['replicatedJobs'])
  assert place.coordinator.startswith(f'{name}-{role}-0-0.{name}:')
  assert len(f'{name}-{role}-0-{hosts - 1}') <= 63


def test_all_pods_start_again_unless_one_has_failed_by_itself(capsys):
  job = jobs.Job('x', 'c', (), (), '/data/w', 2)
  (document,) = load(capsys, [job], make(restarts=7))
  policy = document['spec']['failurePolicy']
  assert policy['maxRestarts'] == 7
  assert policy['rules'][0]['action'] == 'FailJobSet'
  spec = job_of(document)
  assert spec['backoffLimit'] == 0
  assert spec['template']['spec']['restartPolicy'] == 'Never'
  (rule,) = spec['podFailurePolicy']['rules']
  assert rule['action'] == 'FailJob'
  assert rule['onExitCodes'] == {
    'operator': 'In',
    'values': [1, 2, 3],
    'containerName': container_of(document)['name'],
  }


@pytest.mark.parametrize(
  'resources, selector, limits',
  [
    (
      {'tpu': 'v5litepod-16', 'memory': 90},
      {'tpu-accelerator': 'tpu-v5-lite-podslice', 'tpu-topology': '4x4'},
      {'google.com/tpu': 4, 'memory': '90Gi'},
    ),
    (
      {'gpus': 8, 'gpu_type': 'nvidia-h100-80gb'},
      {'accelerator': 'nvidia-h100-80gb'},
      {'nvidia.com/gpu': 8},
    ),
  ],
)
def test_devices_are_asked_for_by_kind_and_number(
  capsys, resources, selector, limits
):
  job = jobs.Job('x', 'c', (), (), '/data/w', 4, jobs.Resources(**resources))
  (document,) = load(capsys, [job], make(**resources, queue='q'))
  assert job_of(document)['template']['spec']['nodeSelector'] == {
    f'cloud.google.com/gke-{key}': value for key, value in selector.items()
  }
  assert container_of(document)['resources']['limits'] == limits
  labels = document['metadata']['labels']
  assert labels == {'kueue.x-k8s.io/queue-name': 'q'}


def test_the_documents_are_applied_through_stdin(tmp_path, monkeypatch):
  scripts.program(tmp_path, 'kubectl', 'echo "$@" > args; cat > stdin')
  monkeypatch.setenv('PATH', scripts.environment(tmp_path)['PATH'])
  monkeypatch.chdir(tmp_path)
  job = jobs.Job('x', 'c', (), (), '/data/w')
  options = make(extra=['--namespace=me'])
  assert on_gke.submit([job], options, dry_run=False) == 0
  assert (tmp_path / 'args').read_text() == 'apply -f - --namespace=me\n'
  (document,) = yaml.safe_load_all((tmp_path / 'stdin').read_text())
  assert document == on_gke.job_set(job, options)
