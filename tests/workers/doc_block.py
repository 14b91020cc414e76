"""The block of a page that is a script for several ranks: doc_block.py FOLDER PAGE ARGUMENTS."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch.distributed as dist
from doc_blocks import blocks, names

if __name__ == "__main__":
    folder, page, *arguments = sys.argv[1:]
    os.chdir(folder)
    (block,) = (block for block in blocks(Path(page)) if block.two_processes)
    sys.argv[1:] = arguments
    exec(block.code, names())  # noqa: S102
    if dist.is_initialized():
        dist.barrier()  # no rank ends while another still works
        dist.destroy_process_group()
