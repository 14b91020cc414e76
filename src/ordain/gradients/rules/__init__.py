"""Rules for the layers of torch.nn, one file a family; importing this package registers them."""

from ordain.gradients.rules import embedding, linear
from ordain.gradients.rules.registry import Rule, Use, register_rule, rule_for

__all__ = ["Rule", "Use", "embedding", "linear", "register_rule", "rule_for"]
