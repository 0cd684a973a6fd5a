"""SFT, then echo, on SQL exploration: grpo that also learns what queries give.

    python -m posttrain.main --config=configs/sql_echo.py --workdir=DIR

configs/sql.py with another algorithm: cross-entropy of weight 0.01 on what the
database says to a query, and to nothing else (`tools`); DESCRIBE and SAMPLE
are tools as well: `--config.grpo.envs.sql.algorithm.tools='("describe",)'`.

`:tiny` runs every part of it and learns nothing.
"""

from configs import sql
from posttrain import schema


def get_config(argument: str = ''):
  echo = schema.Echo(
    kl_beta=sql.GRPO.kl_beta,
    tools=('query',),
    # The default, 0.1, is for models that know language already.
    roles={'tool': schema.EchoRole(alpha=0.01)},
  )
  return sql.get_config(argument, echo)
