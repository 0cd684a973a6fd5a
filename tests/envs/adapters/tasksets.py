"""Tasksets of `verifiers` v1; only imported where it is installed."""

import itertools

import verifiers.v1 as vf


class Data(vf.TaskData):
  answer: str = ''


class Task(vf.Task[Data, vf.State, vf.TaskConfig]):
  @vf.reward
  async def right(self, trace) -> float:
    return float(trace.last_reply == self.data.answer)

  @vf.reward(weight=0.5)
  async def brief(self, task, trace) -> float:
    assert task is self.data
    return float(len(trace.last_reply) < 10)

  @vf.metric
  async def cut(self, trace) -> float:
    return float(trace.is_truncated)

  @vf.metric
  async def turns(self, trace) -> float:
    roles = [node.message.role for node in trace.nodes]
    assert roles[-2:] == ['user', 'assistant']
    assert trace.branches[0].messages == [n.message for n in trace.nodes]
    return float(trace.num_turns)


class Config(vf.TasksetConfig):
  first: int = 0
  system: str | None = 'Add.'
  last: int | None = None


class Sums(vf.Taskset[Task, Config]):
  """An endless taskset of sums."""

  INFINITE = True
  kind = Task

  def load(self):
    cfg = self.config
    for i in itertools.count(cfg.first):
      if i == cfg.last:
        return
      yield self.kind(
        Data(
          prompt=f'{i} + 1 = ?', system_prompt=cfg.system, answer=str(i + 1)
        ),
        cfg.task,
      )


class NeedsRuntime(Task):
  @vf.reward
  async def tests_pass(self, trace, runtime) -> float:
    return 1.0


class Listens(Task):
  def __init__(self, data, config=None):
    super().__init__(data.model_copy(update={'prompt': None}), config)


def _taskset(task):
  return type(f'{task.__name__}s', (Sums,), {'kind': task})


NeedsRuntimes = _taskset(NeedsRuntime)
Listening = _taskset(Listens)
