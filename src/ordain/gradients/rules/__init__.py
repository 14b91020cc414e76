"""Rules for the layers of torch.nn, one file a family; importing this package registers them."""

from ordain.gradients.rules import attention, embedding, linear, recurrent
from ordain.gradients.rules.registry import Rule, Use, Watch, register_rule, rule_for, watch_for

__all__ = [
    "Rule",
    "Use",
    "Watch",
    "attention",
    "embedding",
    "linear",
    "recurrent",
    "register_rule",
    "rule_for",
    "watch_for",
]
