"""Compiled kernels of a CPU: the kernels `fused`, which a model takes where they were built.

For everyone without a GPU. fused.py has the Kernels, library.py finds the compiled file, and the
operators stand in body.h, over the vectors of avx2.h and avx512.h (tiles.h: products of bfloat16
in AMX or AVX512_BF16). Which bits are equal, and why numba was not taken:
docs/develop/decisions/013-compiled-kernels.md.

It plugs in as the kernels of "cpu" in tandem/registry.py. `pip install` compiles it where there is
a C++ compiler; without one, and with TANDEM_KERNELS=plain, the kernels of model/kernels.py compute.
"""
