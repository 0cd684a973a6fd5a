"""Groups of devices in the three notations of HLO."""

import pytest

from experiments import replica_groups

CASES = {
  'replica_groups={{0,1},{2,3}}, use_global_device_ids=true': ((0, 1), (2, 3)),
  'channel_id=1, source_target_pairs={{0,1},{1,0}}': ((0, 1), (1, 0)),
  'replica_groups=[2,3]<=[6], dimensions={0}': ((0, 1, 2), (3, 4, 5)),
  # 0..5 as 2 rows of 3, transposed: 0 3 1 4 2 5.
  'replica_groups=[3,2]<=[2,3]T(1,0), to_apply=%add': ((0, 3), (1, 4), (2, 5)),
  "replica_groups=mesh['a'=2,'b'=3] {'b'}": ((0, 1, 2), (3, 4, 5)),
  "replica_groups=mesh['a'=2,'b'=3] {'a'}": ((0, 3), (1, 4), (2, 5)),
  "replica_groups=mesh['a'=2,'b'=3], device_ids=([3,2]T(1,0)) {'b'}": (
    (0, 2, 4),
    (1, 3, 5),
  ),
  # The axis of 4 is 2 x 2; its first part counts by 2.
  "replica_groups=mesh['a'=4] {'a':(1)2}": ((0, 2), (1, 3)),
  "replica_groups=mesh['a'=4] {'a':(2)2}": ((0, 1), (2, 3)),
  "replica_groups=mesh['a'=2,'b'=2] {'a','b'}": ((0, 1, 2, 3),),
  'channel_id=3, replica_groups={}': (),
}


@pytest.mark.parametrize('text', CASES)
def test_groups_are_read(text):
  assert replica_groups.parse(text) == CASES[text]
