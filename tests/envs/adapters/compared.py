"""A taskset of `verifiers` whose package compares the rollouts of a group."""

import verifiers.v1 as vf

from tests.envs.adapters import tasksets

__all__ = ['Compared', 'Tournament']


class Compared(tasksets.Sums):
  pass


class Config(vf.EnvConfig):
  agent: vf.AgentConfig = vf.AgentConfig()


class Tournament(vf.Env[Config]):
  async def run(self, task, agents):
    await agents.agent.run(task)

  async def finalize(self, task, episode):
    top = max(len(trace.last_reply) for trace in episode.traces)
    for trace in episode.traces:
      trace.record_reward('longest', len(trace.last_reply) == top)
