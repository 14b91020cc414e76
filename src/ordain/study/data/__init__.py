"""Data sets of the study: find, download and verify them, and read them as arrays."""

from __future__ import annotations

from ordain.study.data.data_files import Dataset, Download, File, Labelled, Splits, data_dir, find
from ordain.study.data.datasets import DATASETS, bert_vocabulary, load
from ordain.study.data.fetching import fetch

__all__ = [
    "DATASETS",
    "Dataset",
    "Download",
    "File",
    "Labelled",
    "Splits",
    "bert_vocabulary",
    "data_dir",
    "fetch",
    "find",
    "load",
]
