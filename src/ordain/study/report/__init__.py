"""Reports on runs: verdicts with their statistics, figures, tables and provenance."""

from ordain.study.report.training_content import write_content, write_report, write_reports

__all__ = ["write_content", "write_report", "write_reports"]
