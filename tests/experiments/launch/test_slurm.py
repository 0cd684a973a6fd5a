"""The sbatch script, run here with stand-ins for srun and scontrol."""

import re
import signal
import subprocess

import pytest

from experiments.launch import jobs, on_slurm
from experiments.trials import base
from tests.experiments.launch import scripts

SRUN = 'printf "%s\\0" "$@" > "$HOME/srun.out"; exit "${CODE:-0}"'
SCONTROL = 'echo "$@" >> "$HOME/scontrol.out"'


@pytest.fixture
def programs(tmp_path):
  scripts.program(tmp_path, 'srun', SRUN)
  scripts.program(tmp_path, 'scontrol', SCONTROL)
  return tmp_path


def run(text, folder, **variables):
  return subprocess.run(
    ['bash', '-s'],
    input=text,
    env=scripts.environment(folder, SLURM_JOB_ID='77', **variables),
    capture_output=True,
    text=True,
    timeout=30,
  )


def sweep():
  values = 'grpo.optim.lr=1e-4,3e-4,1e-3'
  found = jobs.expand('c.py', [], [values], 'runs/lr', hosts=2)
  return found, scripts.make('slurm', sweep=[values], jobs=2)


def test_every_value_reaches_the_run_as_it_is(programs):
  job = scripts.nasty_job()
  text = on_slurm.script([job], scripts.make('slurm'))
  assert run(text, programs).returncode == 0
  command = jobs.command(job, 'python3')
  assert scripts.words(programs / 'srun.out') == [
    '--kill-on-bad-exit=0',
    '--wait=300',
    *command,
  ]


def test_each_task_of_the_array_is_one_run(programs):
  found, options = sweep()
  text = on_slurm.script(found, options)
  assert '\n#SBATCH --array=0-2%2\n' in text
  for i, job in enumerate(found):
    run(text, programs, SLURM_ARRAY_TASK_ID=str(i))
    command = jobs.command(job, 'python3')
    assert scripts.words(programs / 'srun.out')[2:] == command
  assert run(text, programs, SLURM_ARRAY_TASK_ID='3').returncode == 2


@pytest.mark.parametrize(
  ('code', 'hosts', 'restarts', 'again'),
  [
    (0, 1, None, False),
    (75, 1, None, True),
    (137, 2, None, True),
    (75, 1, '20', False),
  ],
)
def test_it_requeues_after_some_exit_codes_and_not_for_ever(
  programs, code, hosts, restarts, again
):
  job = jobs.Job('x', 'c.py', (), (), 'w', hosts)
  text = on_slurm.script([job], scripts.make('slurm'))
  count = {} if restarts is None else {'SLURM_RESTART_COUNT': restarts}
  done = run(text, programs, CODE=str(code), **count)
  assert done.returncode == code
  calls = programs / 'scontrol.out'
  assert (calls.read_text() if calls.exists() else '') == (
    'requeue 77\n' if again else ''
  )


def test_a_signal_to_the_script_does_not_end_it_before_the_run(programs):
  scripts.program(
    programs,
    'srun',
    'echo > "$HOME/ready"\n'
    'until [[ -e "$HOME/saved" ]]; do sleep 0.05; done; exit 75',
  )
  job = jobs.Job('x', 'c.py', (), (), 'w')
  text = on_slurm.script([job], scripts.make('slurm'))
  process = subprocess.Popen(
    ['bash', '-c', text],
    env=scripts.environment(programs, SLURM_JOB_ID='77'),
    stdout=subprocess.DEVNULL,
  )
  base.wait_for((programs / 'ready').exists)
  process.send_signal(signal.SIGTERM)
  with pytest.raises(subprocess.TimeoutExpired):
    process.wait(0.3)
  (programs / 'saved').touch()
  assert process.wait(30) == 75
  assert (programs / 'scontrol.out').read_text() == 'requeue 77\n'


def test_nodes_devices_and_time_are_directives():
  resources = jobs.Resources(gpus=8, gpu_type='h100', cpus=12, memory=100)
  job = jobs.Job('x', 'c.py', (), (), 'w', 4, resources)
  options = scripts.make('slurm', time_limit='3h50m')
  text = on_slurm.script([job], options)
  assert re.findall('^#SBATCH (.+)$', text, re.M) == [
    *('--nodes=4', '--ntasks-per-node=1', '--requeue', '--open-mode=append'),
    *('--signal=TERM@120', '--time=235', '--gpus-per-node=h100:8'),
    *('--cpus-per-task=12', '--mem=100G'),
  ]
  assert 'srun --kill-on-bad-exit=0 --wait=300 --cpus-per-task=12 "$' in text
