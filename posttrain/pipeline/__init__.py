"""Batches as resumable iterators: from tasks, or from preference pairs.

`DATA`: kind of stage -> its data. The iterators are in `tokens` and `pairs`.
"""

from posttrain.pipeline import pairs, tokens

DATA = {
  'tokens': tokens.TokenData,
  'preference': pairs.PairData,
  'ranking': pairs.PairData,
}
