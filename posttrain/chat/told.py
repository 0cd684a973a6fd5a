"""The former name of `tool_templates`, which `rollout.tool_turns` imports."""

from posttrain.chat.tool_templates import Style

__all__ = ('Style',)
