"""Rules for the layers of torch.nn, one file a family; importing this package registers them."""

from ordain.gradients.rules import attention, conv, embedding, linear, norm, recurrent
from ordain.gradients.rules.registry import NoRuleError, Rule, Use, Watch, register_rule, rule_for, watch_for

__all__ = [
    "NoRuleError",
    "Rule",
    "Use",
    "Watch",
    "attention",
    "conv",
    "embedding",
    "linear",
    "norm",
    "recurrent",
    "register_rule",
    "rule_for",
    "watch_for",
]
