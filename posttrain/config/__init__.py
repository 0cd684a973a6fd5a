"""ConfigDict <-> schema: recipes, overrides, trust, checks of whole runs."""

from posttrain.config.options import RECIPE_PREFIX as RECIPE_PREFIX
from posttrain.config.options import build as build
from posttrain.config.options import changes as changes
from posttrain.config.options import check_resume as check_resume
from posttrain.config.options import from_dict as from_dict
from posttrain.config.options import is_json as is_json
from posttrain.config.options import load as load
from posttrain.config.options import override as override
from posttrain.config.options import to_dict as to_dict
