"""The block of a page that is a script for several ranks: doc_block.py FOLDER PAGE."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch.distributed as dist
from doc_blocks import blocks, names

if __name__ == "__main__":
    os.chdir(sys.argv[1])
    (block,) = (block for block in blocks(Path(sys.argv[2])) if block.two_processes)
    exec(block.code, names())  # noqa: S102
    if dist.is_initialized():
        dist.barrier()  # no rank ends while another still works
        dist.destroy_process_group()
