"""Trainers as Ray actors, each of which runs `posttrain.main` as a subprocess.

A subprocess, so that a crash of jax leaves the actor to report it, and signals
reach the trainer's main thread. It ends with its actor.
"""

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.util import scheduling_strategies

from experiments.launch import jobs
from experiments.launch.cluster import attempts
from posttrain.util import errors

PLACE_SECONDS = 600.0  # the longest wait for the resources of all trainers
ANSWER_SECONDS = 60.0  # without an answer for so long, an actor is lost
# Runs a module as `python -m` does. It ends with the process that has started
# it: prctl(PR_SET_PDEATHSIG, SIGKILL).
_PROGRAM = (
  'import ctypes, os, runpy, sys; '
  'ctypes.CDLL(None).prctl(1, 9, 0, 0, 0); '
  'os.getppid() == int(sys.argv.pop(1)) or os._exit(1); '
  "runpy.run_module('posttrain.main', run_name='__main__', alter_sys=True)"
)


class Trainer:
  """One trainer; an actor."""

  def __init__(self, path: str):
    """Starts nothing; `path`: the file that gets what the trainer prints."""
    self._path, self._process = path, None

  def address(self) -> str:
    """Returns this node's address with a port that is free now."""
    with socket.socket() as server:
      server.bind(('', 0))
      return f'{ray.util.get_node_ip_address()}:{server.getsockname()[1]}'

  def start(self, words: Sequence[str], folder: str, cluster: str) -> None:
    """Starts the process.

    Args:
      words: the arguments of posttrain.main.
      folder: the current folder, if this node has it.
      cluster: the address of Ray, for workers of environments.
    """
    pathlib.Path(self._path).parent.mkdir(parents=True, exist_ok=True)
    with open(self._path, 'ab') as log:
      self._process = subprocess.Popen(
        [sys.executable, '-c', _PROGRAM, str(os.getpid()), *words],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        cwd=folder if os.path.isdir(folder) else None,
        env={**os.environ, 'RAY_ADDRESS': cluster},
      )

  def end(self) -> int | None:
    """Returns the exit code; negative = the signal; None while it runs."""
    return None if self._process is None else self._process.poll()

  def signal(self, number: int) -> None:
    """Sends a signal to the process."""
    if self._process is not None:
      self._process.send_signal(number)

  def kill(self) -> None:
    """Kills the process and waits for its end."""
    if self._process is not None:
      self._process.kill()
      self._process.wait()

  def last_line(self) -> str:
    """Returns the last line that was printed."""
    return jobs.last_line(self._path)


class Group:
  """The trainers of an attempt, see `attempts.Trainers`."""

  def __init__(
    self,
    words: Sequence[str],
    hosts: int,
    bundle: dict[str, float],
    workdir: str,
    say: Callable[[str], None],
  ):
    """Places and starts all trainers.

    Args:
      words: the arguments of posttrain.main, without those of the place.
      hosts: the number of trainers.
      bundle: the resources of each, as Ray names them.
      workdir: the run's folder, in which `logs` gets what they print.
      say: prints one line per event.

    Raises:
      RuntimeError: the cluster has no place for all of them.
      StartError: an actor or a node was lost meanwhile.
    """
    self._say, self._lost = say, {}
    nodes = sum(node['Alive'] for node in ray.nodes())
    strategy = 'STRICT_SPREAD' if nodes >= hosts > 1 else 'SPREAD'
    self._group: Any = ray.util.placement_group(
      [bundle] * hosts, strategy=strategy
    )
    self._actors: list[Any] = []
    try:
      self._place(hosts, bundle, workdir)
      self._start(words)
    except BaseException as error:
      self.close()
      if isinstance(error, ray.exceptions.RayError):
        raise attempts.StartError(errors.describe(error)) from error
      raise

  def _place(self, hosts: int, bundle: dict[str, float], workdir: str) -> None:
    if not self._group.wait(PLACE_SECONDS):
      raise RuntimeError(
        f'the cluster must have {hosts} places with {bundle}: got '
        f'{ray.available_resources()} within {PLACE_SECONDS:g} s'
      )
    named = 'CPU', 'GPU', 'memory'
    rest = {k: x for k, x in bundle.items() if k not in named}
    for index in range(hosts):
      place = scheduling_strategies.PlacementGroupSchedulingStrategy(
        self._group, placement_group_bundle_index=index
      )
      options = ray.remote(Trainer).options(
        num_cpus=bundle['CPU'],
        num_gpus=bundle.get('GPU', 0),
        memory=bundle.get('memory'),
        resources=rest,
        scheduling_strategy=place,
      )
      path = os.path.join(workdir, 'logs', f'process_{index}.txt')
      self._actors.append(options.remote(path))

  def _start(self, words: Sequence[str]) -> None:
    count, begin = len(self._actors), time.monotonic()
    address = ray.get(self._actors[0].address.remote(), timeout=PLACE_SECONDS)
    cluster = ray.get_runtime_context().gcs_address
    references = []
    for index, actor in enumerate(self._actors):
      place = [
        f'--coordinator={address}',
        f'--num_processes={count}',
        f'--process_id={index}',
      ]
      arguments = [*words, *(place if count > 1 else ())]
      references.append(actor.start.remote(arguments, os.getcwd(), cluster))
    ray.get(references, timeout=PLACE_SECONDS)
    self._say(
      f'{count} trainers started, coordinator {address}, '
      f'in {time.monotonic() - begin:.1f} s'
    )

  def ends(self) -> list[attempts.End]:
    """Returns the end of each trainer so far."""
    references = [actor.end.remote() for actor in self._actors]
    limit = time.monotonic() + ANSWER_SECONDS
    return [self._end(index, x, limit) for index, x in enumerate(references)]

  def _end(self, index: int, reference: Any, limit: float) -> attempts.End:
    if index not in self._lost:
      try:
        return ray.get(reference, timeout=max(limit - time.monotonic(), 0.1))
      except ray.exceptions.RayError as error:
        self._lost[index] = error
        self._say(f'trainer {index} is lost: {type(error).__name__}')
    return attempts.LOST

  def signal(self, number: int) -> None:
    """Sends a signal to all that run."""
    self._ask('signal', number)

  def last_lines(self) -> list[str]:
    """Returns the last line that each has printed; '' of lost ones."""
    return self._ask('last_line')

  def _ask(self, method: str, *words: Any) -> list[Any]:
    """Calls a method of every actor; returns the answers, '' of lost ones."""
    answers: list[Any] = []
    for actor in self._actors:
      answers.append('')
      with contextlib.suppress(ray.exceptions.RayError):
        call = getattr(actor, method).remote(*words)
        answers[-1] = ray.get(call, timeout=ANSWER_SECONDS)
    return answers

  def close(self) -> None:
    """Kills what still runs, and gives the places back."""
    self._ask('kill')
    for actor in self._actors:
      with contextlib.suppress(ray.exceptions.RayError):
        ray.kill(actor)
    with contextlib.suppress(ray.exceptions.RayError):
      ray.util.remove_placement_group(self._group)
