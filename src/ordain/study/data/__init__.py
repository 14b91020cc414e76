"""Data sets of the study: find, download and verify them, and read them as arrays."""

from __future__ import annotations

from ordain.study.data.data_files import data_dir, find
from ordain.study.data.dataset import Dataset, Download, File, Labelled, Splits
from ordain.study.data.datasets import DATASETS
from ordain.study.data.fetching import fetch
from ordain.study.data.loading import bert_vocabulary, load

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
