"""Exit codes of all commands."""

DONE = 0
FAILED = 1  # the run or the world failed; the message says how
USAGE = 2  # the command line, the config or a file it names is wrong
# No rollout of a stage had a reward, because reward functions or episodes
# failed.
NO_REWARD = 3
STALLED = 4  # a run that made no progress was ended
PEER_LOST = 5  # another process of the run has ended or does not answer
PREEMPTED = 75  # saved and stopped; start it again (EX_TEMPFAIL)
INTERRUPTED = 130  # Ctrl-C
