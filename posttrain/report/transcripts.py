"""Episodes of several turns as HTML: actions, observations and rewards.

A task is a section: its question and expected answer, and one column per
attempt, side by side. Without CSS it is headings and lists, so that a text
browser shows it, too.

An attempt is an `evaluation.answers.Answer` as a dict, as in the files in
`rollouts/`.
"""

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MAX_ACTION = 600  # characters shown of a turn of the policy
MAX_OBSERVATION = 600  # characters shown of an environment's message
MAX_QUESTION = 800  # characters shown of the question, from its end
# `QUERY: SELECT 1`: the kind of action, and its argument.
_ACTION = re.compile(r'([A-Z][A-Z_]+)(?::\s*|\s+)(?=\S)')
# Colors on paper and light screens, and on dark screens.
LIGHT = """--paper: #fff; --ink: #1f2933; --muted: #66727f; --rule: #e3e7eb;
  --soft: #f6f7f9; --good: #2f7a46; --bad: #b4432f;"""
DARK = """--paper: #14181c; --ink: #d9dfe5; --muted: #909ba6; --rule: #2c343b;
  --soft: #1e242a; --good: #6fbf87; --bad: #e58a75;"""
STYLE = """
.task { margin: 1.6rem 0 2.6rem; }
.task h3 { font-size: 0.82rem; font-weight: 500; color: var(--muted);
  margin: 0; }
.ask { margin: 0.2rem 0; white-space: pre-wrap; overflow-wrap: anywhere; }
.want { color: var(--muted); font-size: 0.9rem; margin: 0 0 0.8rem; }
.plays { display: grid; gap: 1.2rem;
  grid-template-columns: repeat(auto-fit, minmax(15rem, 1fr)); }
.play { border-top: 3px solid var(--rule); padding-top: 0.4rem;
  min-width: 0; }
.play.good { border-color: var(--good); color: var(--ink); }
.play.bad { border-color: var(--bad); color: var(--ink); }
.play h4 { font-size: 0.9rem; margin: 0 0 0.5rem; }
.play ol { list-style: none; margin: 0; padding: 0; }
.play li { margin: 0 0 0.7rem; break-inside: avoid; }
.play p { margin: 0; }
.act, .see { font: 0.82rem/1.5 ui-monospace, Menlo, Consolas, monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; padding: 0.3rem 0.6rem; }
.act { background: var(--soft); border-radius: 4px; }
.act b { font-weight: 600; font-size: 0.72rem; letter-spacing: 0.04em;
  color: var(--muted); }
.act i { float: right; margin-left: 0.8rem; font-style: normal;
  font-size: 0.76rem; color: var(--muted); }
.see { color: var(--muted); font-size: 0.76rem; }
.end { font-size: 0.85rem; }
.end span { color: var(--muted); }
.end .good { color: var(--good); } .end .bad { color: var(--bad); }
@media print { .act { border: 1px solid var(--rule); } }
"""

Row = Mapping[str, Any]


def multi_turn(rows: Iterable[Row]) -> set[str]:
  """Returns the environments with an episode of more than one message."""
  return {row['env'] for row in rows if len(row.get('messages') or ()) > 1}


def task(attempts: Mapping[str, Row]) -> str:
  """Returns a task and the attempts at it, side by side.

  Args:
    attempts: {title: attempt}, all at the same task.

  Returns:
    HTML for a page that has `STYLE` and the colors of `LIGHT` or `DARK`.
  """
  *_, last = attempts.values()
  question = cut(str(last.get('question', '')), MAX_QUESTION, end=True)
  plays = ''.join(_attempt(name, row) for name, row in attempts.items())
  return (
    f'<section class="task"><h3>task {html.escape(str(last["id"]))}</h3>'
    f'<p class="ask">{html.escape(question)}</p><p class="want">expected: '
    f'{html.escape(cut(str(last.get("answer", "")), MAX_QUESTION))}</p>'
    f'<div class="plays">{plays}</div></section>'
  )


def page(attempts: Mapping[str, Sequence[Row]]) -> str:
  """Returns tasks as HTML with its own style, for a notebook.

  Args:
    attempts: {title: attempts}, at the same tasks in the same order.
  """
  tasks = ''.join(
    task(dict(zip(attempts, rows, strict=True)))
    for rows in zip(*attempts.values(), strict=True)
  )
  paper = f'{LIGHT} background: var(--paper); color: var(--ink);'
  return (
    f'<style>.transcripts {{ {paper} padding: 0.1rem 1.2rem; }} {STYLE}'
    f'</style><div class="transcripts">{tasks}</div>'
  )


def cut(text: str, size: int, *, end: bool = False) -> str:
  """Returns at most `size` characters of a text, from its start or end."""
  text = text.strip()
  if len(text) <= size:
    return text
  return f'... {text[-size:]}' if end else f'{text[:size]} ...'


def _attempt(name: str, row: Row) -> str:
  """Returns one attempt: its turns and its grade."""
  rewards, turns = row.get('turn_rewards') or (), []
  # Zeros are not shown where only the end of an episode is rewarded.
  nonzero_rewards = iter(rewards if any(rewards) else ())
  for message in row.get('messages') or ():
    if message['role'] == 'assistant':
      turns.append(_action(message['content'], next(nonzero_rewards, None)))
    else:
      observation = html.escape(cut(message['content'], MAX_OBSERVATION))
      turns = turns or ['']
      turns[-1] += f'<p class="see">{observation}</p>'
  items = ''.join(f'<li>{turn}</li>' for turn in turns)
  kind = {True: 'good', False: 'bad'}.get(row.get('correct'), '')
  return (
    f'<div class="play {kind}"><h4>{html.escape(name)}</h4>'
    f'<ol>{items}</ol>{_grade(row, kind)}</div>'
  )


def _action(text: str, reward: float | None) -> str:
  """Returns a turn of the policy, and its reward."""
  text, verb = cut(text, MAX_ACTION) or '(empty)', ''
  if match := _ACTION.match(text):
    verb, text = f'<b>{html.escape(match[1])}</b> ', text[match.end() :]
  signed = '' if reward is None else f'<i>{_signed(reward)} </i>'
  return f'<p class="act">{signed}{verb}{html.escape(text)}</p>'


def _grade(row: Row, kind: str) -> str:
  """Returns the grade, the stop reason and the reward of an attempt."""
  grade = {'good': '&#10003; correct', 'bad': '&#10007; wrong'}.get(
    kind, 'not graded'
  )
  details = [str(row.get('stop_reason') or '')]
  if row.get('reward') is not None:
    details.append(f'reward {_signed(row["reward"])}')
  if row.get('error'):
    details.append(cut(str(row['error']), MAX_OBSERVATION))
  text = ', '.join(html.escape(detail) for detail in details if detail)
  return f'<p class="end"><b class="{kind}">{grade}</b> <span>{text}</span></p>'


def _signed(reward: float) -> str:
  """Returns +0.02, or -0.02 with a minus sign as wide as the plus."""
  return f'{reward:+.2f}'.replace('-', '\N{MINUS SIGN}')
