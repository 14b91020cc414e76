"""Rules for the layers of torch.nn, one file a family; importing this package registers them."""

from ordain.gradients.rules import conv, linear, norm, prelu
from ordain.gradients.rules.registry import Rule, Use, register_rule, rule_for

__all__ = ["Rule", "Use", "conv", "linear", "norm", "prelu", "register_rule", "rule_for"]
