"""SFT, then echo, on SQL exploration: GRPO that also learns query results.

    python -m posttrain.main --config=configs/sql_echo.py --workdir=DIR

configs/sql.py with another algorithm: cross-entropy of weight 0.01 on the
results of queries, and on no other text of the environment (`tools`). DESCRIBE
and SAMPLE are tools as well:
`--config.grpo.envs.sql.algorithm.tools='("describe",)'`.

Expected: not measured.

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
