"""Episodes of several turns as HTML: what was done, seen and earned.

A task is a section: its question and expected answer, and side by side one
column per time at which it was attempted. Without CSS it is headings and
lists, so that it can be read in a text browser, too.

The attempts are `evaluation.Answer`s as dicts, as the files in `rollouts/`
hold them.
"""

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

ACTION = 600  # characters shown of what the policy says in a turn,
OBSERVATION = 600  # of what the environment answers,
QUESTION = 800  # and of the question, the last: what is asked stands there
# `QUERY: SELECT 1`: the kind of action, and what it is done to.
_ACTION = re.compile(r'([A-Z][A-Z_]+)(?::\s*|\s+)(?=\S)')
# On paper, and on screens that are light or dark.
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
  """Returns the environments that answered back in one of the episodes."""
  return {row['env'] for row in rows if len(row.get('messages') or ()) > 1}


def task(attempts: Mapping[str, Row]) -> str:
  """Writes a task and the attempts at it, side by side.

  Args:
    attempts: what each is called -> the attempt; all at the same task.

  Returns:
    HTML for a page that has `STYLE` and the colors of `LIGHT` or `DARK`.
  """
  *_, last = attempts.values()
  asked = cut(str(last.get('question', '')), QUESTION, end=True)
  plays = ''.join(_play(name, row) for name, row in attempts.items())
  return (
    f'<section class="task"><h3>task {html.escape(str(last["id"]))}</h3>'
    f'<p class="ask">{html.escape(asked)}</p><p class="want">expected: '
    f'{html.escape(cut(str(last.get("answer", "")), QUESTION))}</p>'
    f'<div class="plays">{plays}</div></section>'
  )


def page(attempts: Mapping[str, Sequence[Row]]) -> str:
  """Writes tasks, to be shown by themselves, as in a notebook.

  Args:
    attempts: what each time is called -> its attempts; the same tasks in the
      same order.
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
  """Shortens a text with an ellipsis, at its end, or with `end` before it."""
  text = text.strip()
  if len(text) <= size:
    return text
  return f'... {text[-size:]}' if end else f'{text[:size]} ...'


def _play(name: str, row: Row) -> str:
  """One attempt: its turns, and what came of it."""
  rewards, turns = row.get('turn_rewards') or (), []
  # Where only the end of an episode is rewarded, the zeros say nothing.
  earned = iter(rewards if any(rewards) else ())
  for said in row.get('messages') or ():
    if said['role'] == 'assistant':
      turns.append(_act(said['content'], next(earned, None)))
    else:
      seen = html.escape(cut(said['content'], OBSERVATION))
      turns = turns or ['']
      turns[-1] += f'<p class="see">{seen}</p>'
  shown = ''.join(f'<li>{turn}</li>' for turn in turns)
  kind = {True: 'good', False: 'bad'}.get(row.get('correct'), '')
  return (
    f'<div class="play {kind}"><h4>{html.escape(name)}</h4>'
    f'<ol>{shown}</ol>{_end(row, kind)}</div>'
  )


def _act(text: str, earned: float | None) -> str:
  """What the policy does in a turn, and earns by it."""
  text, verb = cut(text, ACTION) or '(empty)', ''
  if found := _ACTION.match(text):
    verb, text = f'<b>{html.escape(found[1])}</b> ', text[found.end() :]
  reward = '' if earned is None else f'<i>{_signed(earned)} </i>'
  return f'<p class="act">{reward}{verb}{html.escape(text)}</p>'


def _end(row: Row, kind: str) -> str:
  """How it was graded, why it stopped, what it earned in all."""
  word = {'good': '&#10003; correct', 'bad': '&#10007; wrong'}.get(
    kind, 'not graded'
  )
  more = [str(row.get('stop_reason') or '')]
  if row.get('reward') is not None:
    more.append(f'reward {_signed(row["reward"])}')
  if row.get('error'):
    more.append(cut(str(row['error']), OBSERVATION))
  about = ', '.join(html.escape(part) for part in more if part)
  return f'<p class="end"><b class="{kind}">{word}</b> <span>{about}</span></p>'


def _signed(reward: float) -> str:
  """Writes -0.02 with a minus sign that is as wide as the plus."""
  return f'{reward:+.2f}'.replace('-', '\N{MINUS SIGN}')
