"""Launches: one run, or a sweep of runs, here or on a cluster.

1. `options` reads the command line, which is the same for every place.
2. `jobs` expands `--sweep` into jobs and checks each of their configs.
3. `on_<place>.submit(jobs, options, dry_run)` starts them: on_local, on_ray,
   on_xmanager, on_slurm, on_gke, on_tpu_vm.

A module `on_<place>` is imported when `--on` names its place, so that no place
needs the packages of another, and must import without its own: `--dry_run`
prints what would be submitted wherever it is called.
"""
