"""The commands of ``ordain``; see ``ordain.study.cli``."""
