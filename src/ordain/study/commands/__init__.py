"""One command of ``ordain`` a file; ``ordain.study.cli`` puts them together."""
