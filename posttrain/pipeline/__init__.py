"""Batches as resumable iterators: from tasks, or from preference pairs.

`DATA`: kind of stage -> its data; `tokens` and `pair_data` have the iterators.
"""

from posttrain.pipeline import pair_data, tokens

DATA = {
  'tokens': tokens.TokenData,
  'preference': pair_data.PairData,
  'ranking': pair_data.PairData,
}
