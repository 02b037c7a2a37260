"""Prepares the process as every process of Tandem that computes is; processes of pytest-xdist share the cores between them.

Without a GPU the kernels run in Triton's interpreter, which must be asked for before triton is first imported.
"""

import os

import torch

from tandem import numerics

numerics.prepare(max(1, torch.get_num_threads() // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))))
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
