"""Reports on runs: sentences with their statistics, figures, tables, and where the numbers are from."""

from ordain.study.report.write_report import Failure, write_content, write_report, write_reports

__all__ = ["Failure", "write_content", "write_report", "write_reports"]
