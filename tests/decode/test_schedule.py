"""The options of slots, without a device."""

import numpy as np
import pytest

from posttrain.decode import requests, schedule


def _plain(options):
  return (
    bool((options['top_p'] == 1).all())
    and not options['top_k'].any()
    and not options['min_p'].any()
  )


def test_free_slots_have_the_plain_law():
  """One truncated law has all slots pay for it, at every step."""
  slots = schedule.Schedule(2)
  assert _plain(slots.slot_options())
  law = requests.Sampling(top_k=5, top_p=0.5, min_p=0.1)
  ids = np.array([1, 2], np.int32)
  entry = slots.new(requests.Request(7, ids, 4, sampling=law))
  slots.begin(entry, ids, 0, 4, 16)
  slots.assign_slots()
  options = slots.slot_options()
  assert options['top_k'].tolist() == [5, 0]
  assert options['top_p'].tolist() == [0.5, 1.0]
  assert options['limit'][0] == 6
  slots.finish(entry)
  assert _plain(slots.slot_options())


def test_a_slot_has_the_options_of_its_next_request():
  """Also where order and limit are those of the one before."""
  slots = schedule.Schedule(1)
  ids = np.array([1], np.int32)
  for key, temperature in ((3, 0.5), (4, 0.0)):
    law = requests.Sampling(temperature=temperature)
    entry = slots.new(requests.Request(key, ids, 2, sampling=law))
    slots.begin(entry, ids, 0, 2, 8)
    slots.assign_slots()
    options = slots.slot_options()
    assert options['temperature'].tolist() == [temperature]
    assert options['low'].tolist() == [key]
    slots.finish(entry)


@pytest.mark.parametrize('share, lacking', [(True, [4, 3]), (False, [1, 0])])
def test_a_group_lacks_slots_until_there_are_enough_for_all(share, lacking):
  slots = schedule.Schedule(4)
  slots.share_prefill = share
  assert slots.lacking == 0
  entries = []
  for key in range(8):  # two prompts, of four requests each
    ids = np.array([key // 4], np.int32)
    entries.append(slots.new(requests.Request(key, ids, 2)))
    slots.begin(entries[-1], ids, 0, 2, 8)
  slots.assign_slots()
  found = [slots.lacking]
  slots.finish(entries[0])
  found.append(slots.lacking)
  assert found == lacking
