"""The JobSets: structure, addresses, restarts, values.

The Job in them is checked against the API's schema where kubernetes-validate is
installed.
"""

import pytest
import yaml

from experiments.launch import jobs, on_gke
from posttrain.util import cluster
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
  """Replaces $(NAME) and $$ as the kubelet does, character by character."""
  result, i = '', 0
  while i < len(text):
    after = text[i + 1 : i + 2]
    if text[i] != '$' or not after:
      result, i = result + text[i], i + 1
    elif after == '$':
      result, i = result + '$', i + 2
    elif after == '(' and ')' in text[i:]:
      end = text.index(')', i)
      name = text[i + 2 : end]
      result += variables.get(name, text[i : end + 1])
      i = end + 1
    else:
      result, i = result + '$', i + 1
  return result


def test_every_value_reaches_the_run_as_it_is(capsys):
  job = scripts.nasty_job()
  (document,) = load(capsys, [job], make())
  variables = {'HOME': 'no', 'echo no': 'no'}
  words = [expand(x, variables) for x in container_of(document)['command']]
  assert words == jobs.command(job, 'python3')


@pytest.mark.parametrize('hosts', [2, 16])
def test_the_processes_find_each_other(capsys, hosts):
  job = jobs.Job('LR=1e-4', 'c.py', (), (('a', 'b'),), '/data/w', hosts)
  (document,) = load(capsys, [job], make())
  spec = job_of(document)
  assert spec['completionMode'] == 'Indexed'
  assert spec['completions'] == spec['parallelism'] == hosts
  env = {x['name']: x['value'] for x in container_of(document)['env']}
  for index in (0, hosts - 1):  # Kubernetes sets the index
    place = cluster.find(
      None, None, None, {**env, 'JOB_COMPLETION_INDEX': str(index)}
    )
    assert place is not None
    assert place[1:] == (hosts, index)
    host, _, port = place.coordinator.partition(':')
    name = document['metadata']['name']
    (role,) = (x['name'] for x in document['spec']['replicatedJobs'])
    assert host == f'{name}-{role}-0-0.{name}' and port.isdecimal()
    assert len(f'{name}-{role}-0-{hosts - 1}') <= 63


def test_all_pods_start_again_unless_one_has_failed_by_itself(capsys):
  job = jobs.Job('x', 'c', (), (), '/data/w', 2)
  (document,) = load(capsys, [job], make(restarts=7))
  policy = document['spec']['failurePolicy']
  assert policy['maxRestarts'] == 7
  assert policy['rules'] == [
    {'action': 'FailJobSet', 'onJobFailureReasons': ['PodFailurePolicy']}
  ]
  spec = job_of(document)
  assert spec['backoffLimit'] == 0
  assert spec['template']['spec']['restartPolicy'] == 'Never'
  (rule,) = spec['podFailurePolicy']['rules']
  assert rule['action'] == 'FailJob'
  codes = rule['onExitCodes']
  assert codes['operator'] == 'In' and codes['values'] == [1, 2, 3]
  assert codes['containerName'] == container_of(document)['name']


def test_a_tpu_slice_has_its_node_pool_and_chips(capsys):
  resources = jobs.Resources(tpu='v5litepod-16', memory=90)
  job = jobs.Job('x', 'c', (), (), '/data/w', 4, resources)
  (document,) = load(capsys, [job], make(tpu='v5litepod-16', queue='q'))
  pod = job_of(document)['template']['spec']
  assert pod['nodeSelector'] == {
    'cloud.google.com/gke-tpu-accelerator': 'tpu-v5-lite-podslice',
    'cloud.google.com/gke-tpu-topology': '4x4',
  }
  limits = container_of(document)['resources']['limits']
  assert limits == {'google.com/tpu': 4, 'memory': '90Gi'}
  metadata = document['metadata']
  assert metadata['labels'] == {'kueue.x-k8s.io/queue-name': 'q'}
  assert list(metadata['annotations'].values()) == [
    'cloud.google.com/gke-nodepool'
  ]


def test_gpus_are_asked_for_by_kind_and_number(capsys):
  resources = jobs.Resources(gpus=8, gpu_type='nvidia-h100-80gb')
  job = jobs.Job('x', 'c', (), (), '/data/w', 2, resources)
  options = make(gpus=8, gpu_type='nvidia-h100-80gb')
  (document,) = load(capsys, [job], options)
  pod = job_of(document)['template']['spec']
  kind = {'cloud.google.com/gke-accelerator': 'nvidia-h100-80gb'}
  assert pod['nodeSelector'] == kind
  assert container_of(document)['resources']['limits'] == {'nvidia.com/gpu': 8}
  assert 'privileged' not in str(pod)


def every_kind():
  tpu = jobs.Resources(tpu='v6e-16', cpus=4)
  gpu = jobs.Resources(gpus=8, gpu_type='h100', memory=10)
  return [
    on_gke.job_set(jobs.Job('x', 'c', (), (), '/data/w', 4, resources), options)
    for resources in (tpu, gpu, jobs.Resources())
    for options in (make(), make(queue='q'))
  ]


def test_the_jobs_have_the_schema_of_kubernetes():
  validate = pytest.importorskip(
    'kubernetes_validate', reason='pip install kubernetes-validate'
  )
  for document in every_kind():
    spec = job_of(document)
    job = {'apiVersion': 'batch/v1', 'kind': 'Job', 'metadata': {'name': 'x'}}
    validate.validate({**job, 'spec': spec}, '1.32', strict=True)
    wrong = {**spec, 'backofLimit': 0}
    with pytest.raises(validate.ValidationError):
      validate.validate({**job, 'spec': wrong}, '1.32', strict=True)


def test_the_documents_are_applied_through_stdin(tmp_path, monkeypatch):
  scripts.program(tmp_path, 'kubectl', 'echo "$@" > args; cat > stdin')
  for name, value in scripts.environment(tmp_path).items():
    monkeypatch.setenv(name, value)
  monkeypatch.chdir(tmp_path)
  job = jobs.Job('x', 'c', (), (), '/data/w')
  options = make(extra=['--namespace=me'])
  assert on_gke.submit([job], options, dry_run=False) == 0
  assert (tmp_path / 'args').read_text() == 'apply -f - --namespace=me\n'
  (document,) = yaml.safe_load_all((tmp_path / 'stdin').read_text())
  assert document == on_gke.job_set(job, options)
  scripts.program(tmp_path, 'kubectl', 'echo refused >&2; exit 1')
  with pytest.raises(RuntimeError, match='kubectl must accept .* exit code 1'):
    on_gke.submit([job], options, dry_run=False)
