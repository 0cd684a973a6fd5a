"""Tasks -> groups -> streams -> batch, as resumable iterators."""
