#!/bin/sh
# What Tandem needs beside torch, triton, transformers and pytest, for a GPU machine with Python 3.12 and no package index.
#
#   tools/gpu_wheels.sh get PYTHON       here: 3.5 MB of wheels into build/gpu-wheels, which go along with the tree
#   tools/gpu_wheels.sh run PYTHON ...   there: that Python with them on its path; without them, as it is
set -eu
WHEELS=build/gpu-wheels

case $1 in
get)
    mkdir -p "$WHEELS"
    "$2" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
        --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --dest "$WHEELS" \
        pydantic==2.14.3 pydantic_core==2.50.4 annotated-types==0.8.0 typing-inspection==0.4.5 typing_extensions==4.16.0 \
        math-verify==0.9.0 latex2sympy2_extended==1.11.0 antlr4-python3-runtime==4.13.2 starlette==1.10.0 uvicorn==0.54.0 \
        tensorboardX==2.6.5
    du -sh "$WHEELS"
    ;;
run)
    shift
    if [ -d "$WHEELS" ]; then
        [ -d "$WHEELS/site" ] || "$1" -m pip install --quiet --no-index --no-deps --target "$WHEELS/site" "$WHEELS"/*.whl
        PYTHONPATH="$PWD/$WHEELS/site:$PWD${PYTHONPATH:+:$PYTHONPATH}"
        export PYTHONPATH
    fi
    exec "$@"
    ;;
esac
