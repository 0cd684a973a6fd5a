"""The place of a process, from flags and the variables of launchers."""

import pytest

from posttrain.util import cluster

JAX = {'JAX_COORDINATOR_ADDRESS': 'head:1234', 'JAX_NUM_PROCESSES': '4'}
SLURM = {
  'SLURM_JOB_ID': '7',
  'SLURM_STEP_NODELIST': 'n[1-2]',
  'SLURM_PROCID': '1',
}
NONE = (None, None, None)
ASKS = cluster.Place()  # jax asks the launcher


@pytest.mark.parametrize(
  ('flags', 'environ', 'place'),
  [
    (NONE, {}, None),
    (('head:12', 4, 3), {}, cluster.Place('head:12', 4, 3)),
    (('head:12', 1, 0), {}, None),
    (('head:12', 2, 1), JAX, cluster.Place('head:12', 2, 1)),
    (('auto', None, None), {}, ASKS),
    (NONE, {**JAX, 'JAX_PROCESS_ID': '2'}, cluster.Place('head:1234', 4, 2)),
    (NONE, {**SLURM, 'SLURM_NTASKS': '2'}, ASKS),
    (NONE, {**SLURM, 'SLURM_NTASKS': '1'}, None),
    (NONE, {'OMPI_COMM_WORLD_SIZE': '2'}, ASKS),
    (NONE, {'TPU_WORKER_HOSTNAMES': 'a,b'}, ASKS),
    (NONE, {'TPU_WORKER_HOSTNAMES': 'a'}, None),
    (NONE, {'MEGASCALE_NUM_SLICES': '2'}, ASKS),
  ],
)
def test_the_place(flags, environ, place):
  assert cluster.find(*flags, environ) == place


@pytest.mark.parametrize(
  ('flags', 'environ', 'text'),
  [
    (('head:12', 4, None), {}, '--process_id=I must be given together'),
    (('head', 4, 1), {}, "HOST:PORT of process 0: got 'head'"),
    (('head:12', 2, 2), {}, 'got process 2 of 2'),
    (NONE, JAX, 'JAX_PROCESS_ID must be given together'),
    (NONE, {**JAX, 'JAX_PROCESS_ID': 'x'}, 'JAX_PROCESS_ID must be a number'),
  ],
)
def test_a_wrong_place_names_the_flag_or_variable(flags, environ, text):
  with pytest.raises(ValueError) as raised:
    cluster.find(*flags, environ)
  assert text in str(raised.value)
