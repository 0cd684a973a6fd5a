"""Rows of the table: programs compiled for a target."""

import dataclasses
import time
from typing import Any

from experiments import budgets, census, hlo, programs
from experiments.aot import checks, kernels, ptx, targets
from posttrain import schema

PLATFORMS = {'cuda': 'gpu', 'tpu': 'tpu'}  # as jax names the backends
TRAVELS = 2  # bytes of a number between devices: bfloat16, unlike on CPUs


@dataclasses.dataclass(frozen=True)
class Program:
  """A program of a model on a mesh of a target."""

  target: str  # one of `targets.TARGETS`
  name: str  # one of `programs.PROGRAMS`
  preset: str
  mesh: tuple[int, int, int]
  layers: int | None = None  # None = the preset's

  def __str__(self):
    return f'{self.target}-{self.name}-{self.preset}-' + ','.join(
      map(str, self.mesh)
    )

  @property
  def model(self) -> schema.Model:
    """The model's options."""
    model = schema.PRESETS[self.preset]
    return dataclasses.replace(model, layers=self.layers or model.layers)


def program(
  case: Program, sizes: programs.Sizes
) -> tuple[dict[str, Any], list[str]]:
  """Compiles a program; returns its row, and what `checks` find wrong."""
  start = time.process_time()
  target, model = targets.TARGETS[case.target], case.model
  mesh = targets.mesh(case.target, case.mesh)
  compiled = programs.lower(
    case.name, model, mesh, sizes, target.platform
  ).compile()
  seconds = time.process_time() - start
  module = hlo.parse(compiled.as_text())
  wrong = checks.kernels(case.name, module, model.layers)
  wrong += checks.memory(compiled, target.memory)
  plans = programs.planned(model, mesh, sizes, PLATFORMS[target.platform])
  if case.name in plans and target.platform == 'cuda':
    planned = plans[case.name]
    wrong += checks.plan(planned.arguments, planned.total, compiled)
  if case.name in ('prefill', 'decode', 'share'):
    wrong += checks.cache(module, compiled, model, case.mesh, sizes)
  row = {
    'kind': 'program',
    **dataclasses.asdict(case),
    'layers': model.layers,
    'kernels': checks.kernel_counts(case.name, module),
    'seconds': seconds,
    **_figures(compiled, module),
  }
  if case.name in ('train_step', 'score'):
    wrong += budgets.violations(module, model, case.mesh, sizes, TRAVELS)
    bound = budgets.weight_bytes(model, case.mesh, TRAVELS)
    row['weights_gib'] = bound / hlo.GIB
  return row, wrong


def _figures(compiled, module: hlo.Module) -> dict[str, Any]:
  memory = compiled.memory_analysis()
  return {
    'collectives_gib': {k: v / hlo.GIB for k, v in module.bytes().items()},
    'arguments_gib': memory.argument_size_in_bytes / hlo.GIB,
    'temporaries_gib': memory.temp_size_in_bytes / hlo.GIB,
    'aliased_gib': memory.alias_size_in_bytes / hlo.GIB,
    'peak_gib': census.peak(compiled) / hlo.GIB,
  }


def kernel(name: str, target: str, folder: str) -> list[dict[str, Any]]:
  """Compiles a case of `kernels`; returns a row per kernel.

  Args:
    name: one of `kernels.CASES`.
    target: one of `targets.TARGETS`.
    folder: an empty folder for the compiler's dumps.
  """
  start = time.process_time()
  case, gpu = kernels.CASES[name], targets.TARGETS[target].platform == 'cuda'
  compiled = kernels.compile(case, target, folder if gpu else None)
  row = {
    'kind': 'kernel',
    'target': target,
    'case': name,
    'seconds': time.process_time() - start,
  }
  if gpu:
    found = ptx.assemble(folder, case.kernels)
    return [{**row, **dataclasses.asdict(x)} for x in found]
  calls = [
    call.op_name
    for call, _ in hlo.parse(compiled.as_text()).custom_calls()
    if checks.CALLS[1] in call.attributes
  ]
  return [
    {**row, 'name': x, 'calls': sum(x in call for call in calls)}
    for x in case.kernels
  ]
