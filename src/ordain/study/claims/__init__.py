"""What a folder of runs says on each claim of the paper: a page of verdicts, and a figure of when ordering pays."""

from ordain.study.claims.claims_page import write_claims

__all__ = ["write_claims"]
