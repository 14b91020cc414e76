"""Reports on runs: verdicts with their statistics, figures, tables and provenance."""

from ordain.study.report.write_report import write_content, write_report, write_reports

__all__ = ["write_content", "write_report", "write_reports"]
