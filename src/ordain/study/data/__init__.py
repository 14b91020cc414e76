"""Data sets of the study: where they are, and their files as arrays."""

from __future__ import annotations

from ordain.study.data.catalogue import DATASETS
from ordain.study.data.fetch import fetch
from ordain.study.data.folder import data_dir, find
from ordain.study.data.kinds import Dataset, Download, File, Labelled, Splits
from ordain.study.data.load import bert_vocabulary, load, wikitext_vocabulary

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
    "wikitext_vocabulary",
]
