"""SFT, then echo, on SQL exploration; hard questions lose 0.02, greedy.

    python -m posttrain.main --config=configs/sql_echo.py --workdir=DIR

configs/sql.py with another algorithm: cross-entropy of weight 0.01 on the
results of queries, and on no other text of the environment (`tools`). DESCRIBE
and SAMPLE are tools as well:
`--config.grpo.envs.sql.algorithm.tools='("describe",)'`.

Expected, on 400 unseen questions, seeds 0, 1, 2: greedy pass rate 0.540, 0.545,
0.537 after SFT, 0.915, 0.963, 0.830 after echo; on hard questions 0.058, 0.090,
0.058, then 0.085, 0.043, 0.035. One core of an AMD EPYC: some 620 CPU seconds
for the last stage.

Over two starts and five seeds, at lr 1.2e-3, in the CPU seconds of GRPO: greedy
0.533, then 0.903 (GRPO 0.909), sampled 0.645, then 0.815 (0.839); hard
questions 0.074, then 0.055, -0.019 [-0.037, -0.002] (docs/results.md, "Recipes
compared in pairs").

`:tiny` runs every part and learns nothing.
"""

import dataclasses

from configs import sql
from posttrain import schema

ECHO = schema.Echo(
  tools=('query',),
  # The default, 0.1, is for pretrained language models.
  roles={'tool': schema.EchoRole(alpha=0.01)},
)
ENTRY = dataclasses.replace(sql.GRPO.envs['sql'], algorithm=ECHO)
STAGE = dataclasses.replace(sql.GRPO, envs={**sql.GRPO.envs, 'sql': ENTRY})


def get_config(argument: str = ''):
  return sql.get_config(argument, STAGE)
