"""A JobSet of Kubernetes per run, with an Indexed Job of one pod per host.

The pods are found by their names: process 0 is pod 0, and posttrain.main reads
JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JOB_COMPLETION_INDEX. Where one
pod ends with an error all are started again, `restarts` times at most, unless
the exit code is 1, 2 or 3: then a process has failed by itself.
"""

import os
import shlex
from collections.abc import Sequence
from typing import Any

from experiments.launch import jobs as jobs_lib
from experiments.launch import options as options_lib
from experiments.launch import submission, tpus
from posttrain.util import errors

PORT = 8476  # of the coordinator
USER = 1000  # of the Dockerfile
_ROLE = 'host'  # the name of the replicated job, and of its container
_GRACE_SECONDS = 300  # to save after SIGTERM
# Of a pod's host name, which has at most 63 characters, less the role and the
# two indices.
_LONGEST_NAME = 45
_ROOT = {'privileged': True, 'runAsUser': 0}


def submit(
  jobs: Sequence[jobs_lib.Job], options: options_lib.Options, dry_run: bool
) -> int:
  """Applies the JobSets, or prints them; returns the exit code.

  Raises:
    ValueError: a flag is missing, or kubectl is absent.
    RuntimeError: kubectl has failed.
  """
  import yaml

  for name in ('image', 'claim'):
    if not getattr(options, name):
      raise ValueError(f'--{name}=TEXT must be given with --on=gke')
  if options.gpus and not options.gpu_type:
    raise ValueError('--gpu_type=TEXT must be given with --on=gke and --gpus')
  for job in jobs:
    if not os.path.normpath(job.workdir).startswith(f'{options.mount}/'):
      raise ValueError(
        '--workdir must be within --mount, the folder of the claim: got '
        f'{job.workdir!r}, expected {options.mount}/...'
      )
  text = yaml.safe_dump_all(
    [job_set(job, options) for job in jobs], sort_keys=False
  )
  command = ['kubectl', 'apply', '-f', '-', *options.extra]
  if dry_run:
    print(f"{shlex.join(command)} << 'END'\n{text}END")
    return errors.DONE
  submission.run('gke', command, text)
  return errors.DONE


def job_set(job: jobs_lib.Job, options: options_lib.Options) -> dict[str, Any]:
  """Returns the JobSet of a run, as the YAML that kubectl reads."""
  name = submission.run_name(job, options.title, _LONGEST_NAME)
  metadata: dict[str, Any] = {'name': name}
  if options.queue:
    metadata['labels'] = {'kueue.x-k8s.io/queue-name': options.queue}
  if job.resources.tpu:  # a slice is a node pool of its own
    topology = 'alpha.jobset.sigs.k8s.io/exclusive-topology'
    metadata['annotations'] = {topology: 'cloud.google.com/gke-nodepool'}
  # Another start would fail as well.
  values = [errors.FAILED, errors.USAGE, errors.NO_REWARD]
  codes = {'containerName': _ROLE, 'operator': 'In', 'values': values}
  final = {'action': 'FailJob', 'onExitCodes': codes}
  # The JobSet starts all pods again, never a single one.
  spec = {
    'completionMode': 'Indexed',
    'completions': job.hosts,
    'parallelism': job.hosts,
    'backoffLimit': 0,
    'podFailurePolicy': {'rules': [final]},
    'template': {'spec': _pod(job, options, name)},
  }
  replicated = {'name': _ROLE, 'replicas': 1, 'template': {'spec': spec}}
  return {
    'apiVersion': 'jobset.x-k8s.io/v1alpha2',
    'kind': 'JobSet',
    'metadata': metadata,
    'spec': {
      'network': {'enableDNSHostnames': True, 'publishNotReadyAddresses': True},
      'failurePolicy': {
        'maxRestarts': options.restarts,
        'rules': [
          {'action': 'FailJobSet', 'onJobFailureReasons': ['PodFailurePolicy']}
        ],
      },
      'replicatedJobs': [replicated],
    },
  }


def _pod(
  job: jobs_lib.Job, options: options_lib.Options, name: str
) -> dict[str, Any]:
  """Returns the specification of a run's pods."""
  words = jobs_lib.command(job, options.python or 'python3')
  resources, selector, limits = job.resources, {}, {}
  if resources.cpus is not None:
    limits['cpu'] = resources.cpus
  if resources.memory is not None:
    limits['memory'] = f'{resources.memory}Gi'
  if resources.gpus:
    selector['cloud.google.com/gke-accelerator'] = resources.gpu_type
    limits['nvidia.com/gpu'] = resources.gpus
  is_tpu = bool(resources.tpu)
  if is_tpu:
    tpu = tpus.find(resources.tpu)
    selector['cloud.google.com/gke-tpu-accelerator'] = tpu.label
    selector['cloud.google.com/gke-tpu-topology'] = tpu.topology
    limits['google.com/tpu'] = tpu.chips_per_host
  container = {
    'name': _ROLE,
    'image': options.image,
    # Kubernetes replaces $(NAME); $$ is a dollar sign.
    'command': [word.replace('$', '$$') for word in words],
    'env': [
      {'name': key, 'value': text}
      for key, text in environment(job, name).items()
    ],
    'resources': {'limits': limits, 'requests': dict(limits)},
    # The devices of a TPU belong to root.
    **({'securityContext': _ROOT} if is_tpu else {}),
    'volumeMounts': [{'name': 'data', 'mountPath': options.mount}],
  }
  claim = {'claimName': options.claim}
  taint = {'key': 'google.com/tpu', 'operator': 'Exists'}
  return {
    'restartPolicy': 'Never',
    'terminationGracePeriodSeconds': _GRACE_SECONDS,
    'securityContext': {'fsGroup': USER},
    **({'nodeSelector': selector} if selector else {}),
    **({'tolerations': [taint]} if is_tpu else {}),
    'containers': [container],
    'volumes': [{'name': 'data', 'persistentVolumeClaim': claim}],
  }


def environment(job: jobs_lib.Job, name: str) -> dict[str, str]:
  """Returns the variables that tell the processes of a run about each other.

  Args:
    job: the job.
    name: the JobSet's.
  """
  variables = {'PYTHONUNBUFFERED': '1'}
  if job.hosts > 1:
    # JobSet names pods NAME-ROLE-JOB-POD, in the subdomain of its own name.
    address = f'{name}-{_ROLE}-0-0.{name}:{PORT}'
    variables['JAX_COORDINATOR_ADDRESS'] = address
    variables['JAX_NUM_PROCESSES'] = str(job.hosts)
  return variables
