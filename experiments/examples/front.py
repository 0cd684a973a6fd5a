"""The picture of the README: what runs of one recipe, over seeds, learned.

    python -m experiments.examples.front RUN RUN ... \
        --output=experiments/results/arithmetic.png

Three panels of the last stage: held-out pass rates and the reward of rollouts,
each the mean of the runs with a band from the lowest to the highest, and the
seconds of all stages by part. The runs are of the same recipe, each with
`metrics.jsonl`.
"""

import collections
import sys

import matplotlib.figure
import numpy as np

from experiments.benchmarks import timing
from posttrain.metrics import writers
from posttrain.report import curves

# {metric: (label, points from a line's ends to their texts)}
RATES = {
  'eval/sampled_pass_rate/': ('answers sampled at temperature 1', -14),
  'eval/pass_rate/': ('greedy answers', 8),
}
REWARD = {'rollout/reward/': ('rollouts', -14)}
TITLES = 'Held-out pass rate, {} seeds', 'Reward in training', 'Seconds, median'
PARTS = 'rollout', 'update', 'eval', 'compile'
WINDOW = 5  # steps that a point of the reward is the mean of


def series(runs, key) -> tuple[np.ndarray, np.ndarray]:
  """Returns the steps with the metric, and f64[runs, steps]."""
  columns = [
    {row['step']: v for row in run for k, v in row.items() if k.startswith(key)}
    for run in runs
  ]
  steps = sorted(set.intersection(*map(set, columns)))
  return np.array(steps), np.array([[x[s] for s in steps] for x in columns])


def band(axis, runs, metrics) -> None:
  """Draws the mean and the range of metrics, over the runs."""
  for color, key in zip(curves.COLORS, metrics, strict=False):
    label, offset = metrics[key]
    steps, values = series(runs, key)
    if len(steps) > 10:
      kernel = np.ones(WINDOW) / WINDOW
      values = np.array([np.convolve(x, kernel, 'valid') for x in values])
      steps = steps[WINDOW - 1 :]
    mean = values.mean(axis=0)
    axis.plot(
      steps,
      mean,
      color=color,
      marker='o' if len(steps) < 10 else '',
      label=label,
    )
    axis.fill_between(
      steps, values.min(axis=0), values.max(axis=0), color=color, alpha=0.15
    )
    style = {'textcoords': 'offset points', 'color': color, 'weight': 'bold'}
    for i, side in (0, 'left'), (-1, 'right'):
      at = steps[i], mean[i]
      axis.annotate(f'{mean[i]:.1%}', at, (0, offset), ha=side, **style)


def main() -> int:
  """Runs the command; returns its exit code."""
  parser = timing.parser(__doc__, output='front.png')
  parser.add_argument('runs', nargs='+')
  args = parser.parse_args()
  runs = [writers.read_metrics(f'{x}/metrics.jsonl') for x in args.runs]
  stage, *_ = stages = [*dict.fromkeys(row['stage'] for row in runs[0])][::-1]
  last = [[row for row in run if row['stage'] == stage] for run in runs]
  figure = matplotlib.figure.Figure((11, 3), layout='constrained')
  axes = figure.subplots(1, 3)
  for axis, title in zip(axes, TITLES, strict=True):
    curves.frame(axis, title.format(len(runs)))
  for axis, metrics in zip(axes, (RATES, REWARD), strict=False):
    band(axis, last, metrics)
    axis.legend(frameon=False, fontsize=8, loc='lower right')
    axis.set_xlabel(f'{stage} step', color=curves.MUTED, fontsize=8)
    axis.yaxis.set_major_formatter('{x:.0%}')
    axis.margins(y=0.15)
  left, totals = np.zeros(len(stages)), collections.defaultdict(float)
  for number, row in ((i, row) for i, run in enumerate(runs) for row in run):
    for part, seconds in curves.slices(row).items():
      totals[number, row['stage'], part] += seconds
  for color, part in zip(curves.COLORS, PARTS, strict=False):
    width = [
      np.median([totals[i, x, part] for i in range(len(runs))]) for x in stages
    ]
    axes[2].barh(stages, width, 0.5, left, color=color, label=part)
    left += width
  for name, end in zip(stages, left, strict=True):
    axes[2].annotate(f' {end:.0f} s', (end, name), va='center')
  axes[2].set(xlim=(0, 1.15 * left.max()), ylim=(-0.5, len(stages)))
  axes[2].grid(visible=False)
  axes[2].legend(frameon=False, fontsize=8, ncols=4, loc='upper center')
  figure.savefig(args.output, dpi=160)
  return 0


if __name__ == '__main__':
  sys.exit(main())
