"""Assembly of a stage: from its options to the running `job.Job`."""
