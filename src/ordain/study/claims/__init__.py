"""The paper's claims checked against a folder of runs."""

from ordain.study.claims.claims_page import write_claims

__all__ = ["write_claims"]
