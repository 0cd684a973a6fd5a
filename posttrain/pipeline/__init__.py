"""Tasks -> groups -> streams -> batch, as resumable iterators.

`DATA` has the data of each kind of stage; what it yields batches by is in
`tokens` and `pairs`.
"""

from posttrain.pipeline import pairs, tokens

DATA = {
  'tokens': tokens.TokenData,
  'preference': pairs.preference_data,
  'ranking': pairs.ranking_data,
}
