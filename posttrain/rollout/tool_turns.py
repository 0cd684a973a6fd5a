"""Turns of the policy that call tools: the results, and the counts of calls."""

from typing import cast

from posttrain import types
from posttrain.chat import tool_calls, tool_specs
from posttrain.envs import base
from posttrain.util import foreign

_LONGEST = 2000  # characters of the message of an exception
_CUT = 'the turn was cut off before its end: its calls are not made'


class Turns:
  """The turns of one episode with tools."""

  def __init__(self, tools_of_task: types.Tools):
    self._schemas = tool_specs.parameters(tools_of_task.schemas)
    self._turns = self._malformed = self._calls = self._failures = 0

  def play(
    self,
    episode: base.Episode,
    text: str,
    truncated: bool,
    style: tool_specs.Style,
  ) -> types.Messages:
    """Makes the calls of a turn, in order.

    Those of a truncated turn are malformed and not made, not even the complete
    ones: the policy had not ended what it wanted to call.

    Returns:
      A message per call, or one for all of them in the role 'user'; () for a
      turn without calls.
    """
    calls = tool_calls.parse(text, style.format, self._schemas, truncated)
    problems = [tool_specs.problem(call, self._schemas) for call in calls]
    if truncated:
      problems = [problem or _CUT for problem in problems]
    self._turns += 1
    self._calls += len(calls)
    self._malformed += any(problems)
    results = [
      self._failure(problem) if problem else self._result(episode, call)
      for call, problem in zip(calls, problems, strict=True)
    ]
    if style.role == 'user' and results:
      return ({'role': 'user', 'content': '\n'.join(results)},)
    return tuple(
      {'role': style.role, 'name': call.name, 'content': result}
      for call, result in zip(calls, results, strict=True)
    )

  def metrics(self) -> dict[str, float]:
    """Returns the counts of the episode, as metrics of its score.

    calls; failures, calls that got an error; malformed, the share of turns with
    a call that could not be read, did not fit its tool, or was in a truncated
    turn. None without turns.
    """
    if not self._turns:
      return {}
    return {
      'calls': self._calls,
      'failures': self._failures,
      'malformed': self._malformed / self._turns,
    }

  def _result(self, episode: base.Episode, call: tool_calls.Call) -> str:
    run = cast(base.ToolEpisode, episode).call
    try:
      return str(run(call.name, call.arguments))
    except Exception as error:
      return self._failure(foreign.error(error, _LONGEST))

  def _failure(self, reason: str) -> str:
    self._failures += 1
    return f'error: {reason}'
