"""Optimizers beside AdamW.

For runs where the state of AdamW is the largest part of an update, or that train with Muon. Bits do
not depend on the number of threads or processes, and are the same after a resume.

    adamw_8bit.py   train.optimizer = adamw_8bit: moments of matrices in 8 bits a number
    muon.py         train.optimizer = muon: orthogonalized momentum for the matrices of the layers
    offload.py      train.offload_optimizer: masters and moments in host memory between updates

It plugs in as optimizers and offload of tandem/registry.py, and needs no package.
"""
