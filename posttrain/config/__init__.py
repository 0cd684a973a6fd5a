"""ConfigDict <-> schema: recipes, overrides, trust, checks of whole runs."""

from posttrain.config.options import (
  build,
  changes,
  check_resume,
  from_dict,
  is_json,
  load,
  override,
  override_all,
  to_dict,
)
