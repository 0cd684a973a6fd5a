"""The index of the pages for language models, in the form of llms.txt.

`docs/index.md` has a table of pages under each heading; `page` writes them as
lists.
"""

import pathlib
import re

HEAD = """# posttrain

> Post-training of language models in JAX: SFT, RL, distillation and
> preferences, of all weights or a LoRA, on HuggingFace directories or from
> scratch.

Every environment of a run has its own algorithm. A run is a recipe of
`configs/`, whose keys are changed on the command line
(`python -m posttrain.main --config=NAME --workdir=DIR --config.KEY=VALUE`), or
a call of `posttrain.api`.
"""


def page(index: pathlib.Path) -> str:
  """Returns the text of llms.txt.

  Args:
    index: docs/index.md.
  """
  lines = [HEAD]
  for line in index.read_text().splitlines():
    if line.startswith('## '):
      lines.append(f'{line}\n')
    elif row := re.fullmatch(r'\| \[(.+?)\]\((.+?)\) \| (.*) \|', line):
      title, path, text = row.groups()
      lines.append(f'- [{title}]({path}): {text}')
  text = '\n'.join(lines)
  return re.sub(r'\n+## ', '\n\n## ', text).rstrip() + '\n'
