"""Models that score, sample, judge or reward, and do not train.

    'policy'          the parameters of the last `set_policy`
    'ema:DECAY', 'snapshot:STEPS'   an average, or an earlier copy, of the
                      policy, see `ema_and_snapshots`; set by `set_policy` too
    'init'            the stage's initial parameters
    'stage:NAME'      the last checkpoint of an earlier stage of the run; where
                      that stage selects (`eval.best`), the best one
    PATH              a run or a HuggingFace folder, see `weights`
    schema.Endpoint   a model on a server, see `endpoints`

The grammar is that of `init`. A model in this process is sharded as the policy
is; the model of a path may have another shape. All have the policy's tokens.
Equal references share one model.

`stage.preflight` resolves a name to a folder, fixed when a stage begins, and
loads its model. `References` is the algorithms' scorer.

`References.start` returns before the logprobs exist, so that several models
work side by side: a thread waits for a server, and devices compute the programs
that were launched. Programs are launched, and values of processes exchanged, in
the caller's thread and in the order of its calls, because all processes of a
run must do so in the same order. The thread of a server does neither.

`RewardModel` is a trained reward model as a source of rewards.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from posttrain import processes, schema, scoring, types
from posttrain.chat import rendering
from posttrain.rollout import grading, side_by_side

Params = Any


class Model(NamedTuple):
  """A model in this process."""

  params: Params
  cfg: schema.Model  # with its vocabulary


class _Head(NamedTuple):
  """Tokens that a sample begins with in a reference's context."""

  ids: np.ndarray  # i32
  replaced: int  # number of the sample's own first tokens that are left out


_NO_HEAD = _Head(np.zeros(0, np.int32), 0)


def hinted(prompt: types.Messages, hint: types.Messages) -> types.Messages:
  """Returns a prompt with a hint: before the text of its first such message.

  A prompt without a message of the hint's role gets the hint as its first one.
  So a conversation keeps one system message, and its turns alternate, as many
  chat templates demand.

  Args:
    prompt: the messages.
    hint: one message, of the role system or user.
  """
  (message,) = hint
  for i, other in enumerate(prompt):
    if other['role'] == message['role']:
      text = f'{message["content"]}\n\n{other["content"]}'
      return (*prompt[:i], {**other, 'content': text}, *prompt[i + 1 :])
  return (message, *prompt)


def render_hinted(
  renderer: rendering.Renderer,
  prompt: types.Messages,
  hint: types.Messages,
  add_generation_prompt: bool = True,
) -> rendering.Rendered:
  """Renders a prompt with a hint, see `hinted`.

  A hint of the role system goes into the first user message where the chat
  template refuses system messages, or leaves them out.

  Args:
    renderer: renders the prompt.
    prompt: the messages.
    hint: one message, of the role system or user.
    add_generation_prompt: whether to append the header of an assistant turn.

  Raises:
    ValueError: the template refuses the prompt with the hint.
  """
  (message,) = hint

  def render(role):
    messages = hinted(prompt, ({**message, 'role': role},))
    return renderer.render(
      messages, add_generation_prompt=add_generation_prompt
    )

  if message['role'] == 'system':
    with contextlib.suppress(ValueError):
      rendered = render('system')
      if message['content'].strip() in rendered.text:
        return rendered
  return render('user')


@dataclasses.dataclass(eq=False)
class Scores(Sequence[np.ndarray]):
  """Logprobs of samples, f32[T] each, which the first access waits for."""

  length: int  # the number of samples
  finish: Callable[[], list[np.ndarray]]  # waits and returns them
  # Done once that wait is short; none for a model in this process.
  futures: Sequence[concurrent.futures.Future] = ()

  def __len__(self) -> int:
    return self.length

  def __getitem__(self, index):
    return self._logprobs[index]

  @functools.cached_property
  def _logprobs(self) -> list[np.ndarray]:
    return self.finish()


class References:
  """The algorithms' scorer: `references(reference, samples)`."""

  def __init__(
    self,
    model: schema.Model,
    renderer: rendering.Renderer,
    scorer: Callable[[schema.Model, int], scoring.Scorer],
    *,
    capacity: int,
    load: Callable[[str], Model],
    held: Mapping[str, Params] | None = None,
    client: Callable[[schema.Endpoint, str, int], Any] | None = None,
  ):
    """Starts without models; they are loaded on first use.

    Args:
      model: the policy's options.
      renderer: the policy's renderer.
      scorer: builds the scorer of a model for sequences up to a length.
      capacity: tokens of the longest sample.
      load: returns the model of a name; called once per name, unless the name
        is in `held` or tracks the policy.
      held: parameters of the policy's shape that are in memory anyway.
      client: returns the client of a server, by its options, the caller's name
        and the number of tokens; None = there are no servers.
    """
    self._model, self._renderer = model, renderer
    self._scorer = functools.cache(scorer)
    self._capacity, self._load = capacity, load
    self._models = {k: Model(v, model) for k, v in (held or {}).items()}
    self._client = client
    self._endpoints: dict[schema.Endpoint, Any] = {}

  def set_policy(self, params: Mapping[str, Params]) -> None:
    """Sets the parameters of 'policy', 'ema:DECAY' and 'snapshot:STEPS'.

    The arrays must not be donated before the next call.
    """
    self._models |= {k: Model(v, self._model) for k, v in params.items()}

  def model(self, reference: str) -> Model:
    """Returns a model in this process; loads it on first use.

    Raises:
      ValueError: the name has no weights.
    """
    if reference not in self._models:
      assert not tracks_policy(reference), (
        'set_policy comes before the first score'
      )
      self._models[reference] = self._load(reference)
    return self._models[reference]

  def endpoint(
    self, reference: schema.Endpoint, caller: str = 'the run'
  ) -> Any:
    """Returns the client of a server; checks the server on first use.

    Args:
      reference: the server and the model.
      caller: the caller's name in logs and errors of the check.

    Raises:
      ValueError: the server has another model, or other tokens.
      EndpointError: it does not answer, or lists no models.
    """
    if reference not in self._endpoints:
      assert self._client is not None, 'a client of servers is needed'
      rows = self._renderer.embedding_rows
      endpoint = self._client(reference, caller, rows)
      self._endpoints[reference] = endpoint  # first, so that `close` ends waits
      endpoint.check(self._renderer)
    return self._endpoints[reference]

  def close(self) -> None:
    """Closes the connections to all servers."""
    for endpoint in self._endpoints.values():
      endpoint.close()

  def __call__(
    self,
    reference: schema.Reference,
    samples: Sequence[types.Sample],
    hints: Sequence[types.Messages] | None = None,
  ) -> list[np.ndarray]:
    """Returns the logprobs of each sample's tokens under a reference.

    They are at the sample's own temperatures, as the losses compute the
    policy's; an endpoint scores all tokens at that of the sampled ones.

    Args:
      reference: a name or an endpoint, see the module.
      samples: samples of any environments.
      hints: one message per sample, put into its prompt in the reference's
        context, see `render_hinted`. A sample that does not begin with the
        prompt of its task (as after a rewritten history) has it before all its
        tokens, as a conversation of its own.

    Returns:
      One f32[T] per sample, in nats; entry 0 is 0.

    Raises:
      ValueError: the name has no weights, or a sample is too long.
      EndpointError: a server does not score the samples.
    """
    return list(self.start(reference, samples, hints))

  def start(
    self,
    reference: schema.Reference,
    samples: Sequence[types.Sample],
    hints: Sequence[types.Messages] | None = None,
  ) -> Scores:
    """Starts to score samples; see `__call__`.

    The first access to the result raises an EndpointError. After `close` a
    server's thread ends, as waits for its server do.
    """
    heads = [_NO_HEAD] * len(samples)
    if hints is not None:
      pairs = zip(samples, hints, strict=True)
      heads = [self._head(sample, hint) for sample, hint in pairs]
    ids = [
      np.concatenate([head.ids, s.ids[head.replaced :]])
      for head, s in zip(heads, samples, strict=True)
    ]
    futures = ()
    if isinstance(reference, schema.Endpoint):
      # A server scores a whole sequence at one temperature: that of the sampled
      # tokens, the only ones that are read.
      pairs = [
        (x, s.temperatures[s.mask].max(initial=0) or 1)
        for x, s in zip(ids, samples, strict=True)
      ]
      names = ', '.join(sorted({sample.env for sample in samples} - {''}))
      own = side_by_side.thread(
        self.endpoint(reference).score,
        processes.share(pairs, key=id),
        f'environment {names}' if names else 'a stage on pairs',
      )
      futures = (own,)

      def finish():
        return processes.divided(pairs, lambda _: own.result(), key=id)

    else:
      temperatures = [
        np.concatenate(
          [np.ones(len(head.ids), np.float32), s.temperatures[head.replaced :]]
        )
        for head, s in zip(heads, samples, strict=True)
      ]
      model = self.model(reference)
      highest = max((int(x.max()) for x in ids), default=0)
      if highest >= model.cfg.vocab_size:
        raise ValueError(
          'a reference must have the tokens that it scores: got token '
          f'{highest}, expected less than {model.cfg.vocab_size}; the policy '
          'has more rows than it, and sampled one without a text'
        )
      width, longest = self._capacity, max(map(len, ids), default=0)
      while width < longest:  # longer with a hint; few widths compile
        width *= 2
      scorer = self._scorer(model.cfg, width)
      finish = scorer.start(model.params, ids, temperatures)
    # Token 0 has no prediction, with or without a hint; nor do tokens of the
    # prompt that the hint has changed.
    first = [max(head.replaced, 1) for head in heads]

    def aligned():
      return [
        np.append(np.zeros(n, np.float32), x[len(x) - len(s) + n :])
        for n, x, s in zip(first, finish(), samples, strict=True)
      ]

    return Scores(len(samples), aligned, futures)

  def _head(self, sample: types.Sample, hint: types.Messages) -> '_Head':
    """Returns what a sample begins with in the reference's context."""
    task, ids = sample.task, sample.ids
    if task is not None:
      renderer = self._renderer.of(task)
      own = renderer.render(task.prompt, add_generation_prompt=True).ids
      if len(own) < len(ids) and np.array_equal(ids[: len(own)], own):
        return _Head(render_hinted(renderer, task.prompt, hint).ids, len(own))
    head = render_hinted(self._renderer, (), hint, False).ids
    bos = self._renderer.tokenizer.bos_id
    # A single bos.
    return _Head(head, int(len(head) > 0 and head[0] == ids[0] == bos))


def tracks_policy(reference: schema.Reference) -> bool:
  """Returns whether a reference changes while a stage trains."""
  return reference == 'policy' or schema.ema_or_snapshot(reference) is not None


class RewardModel:
  """The rewards of rollouts under a trained reward model.

  The reward of a rollout is the value of its last sample at the last sampled
  token, as in training (`pair_objectives.Ranking`). Answers cut by a token
  budget are scored as well, though pairs built from a policy's rollouts contain
  none. All rollouts of a step are scored in packed rows of one shape, by one
  compiled program.
  """

  def __init__(self, name: str, params: Params, scorer: scoring.Scorer):
    """Stores the model.

    Args:
      name: the model's name in errors.
      params: the parameters, with those of the reward head.
      scorer: a scorer that reads 'rewards'.
    """
    self._name, self._params, self._scorer = name, params, scorer

  def __call__(self, rollouts: Sequence[types.Rollout]) -> grading.Result:
    """Scores rollouts, each with samples; a non-finite value is a fault."""
    values = self.rewards([rollout.samples[-1] for rollout in rollouts])
    failed = {i for i, x in enumerate(values) if not np.isfinite(x)}
    error = None
    if failed:
      error = (
        f'reward model {self._name} must return finite rewards: got '
        f'{values[min(failed)]}; rollouts left out: {len(failed)} of '
        f'{len(values)}'
      )
    return grading.Result(
      [None if i in failed else x for i, x in enumerate(values)],
      frozenset(failed),
      {'faults': float(bool(failed))},
      error,
    )

  def rewards(self, samples: Sequence[types.Sample]) -> list[float]:
    """Returns the value of each sample at its last sampled token."""
    scores = self._scorer(
      self._params,
      [sample.ids for sample in samples],
      [np.ones(len(sample), np.float32) for sample in samples],
    )
    return [
      float(x[sample.mask][-1])
      for x, sample in zip(scores, samples, strict=True)
    ]
