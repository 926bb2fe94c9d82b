#!/usr/bin/env bash
# The Dockerfile's steps in a bare virtual environment: install the wheels of dist/, require the default profile, and look at
# what came along. Needs no GPU. TORCH names the torch to install, PYTHON the interpreter.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT
"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet "${TORCH:-torch>=2.10}" dist/tkbuild-*"$(uname -m)".whl dist/tkbuild_kernels_sm90a-*.whl
cd /
"$venv/bin/python" -m tkbuild.runtime require default --arch sm_90a --wheel tkbuild-kernels
"$venv/bin/python" -c "import tkbuild.ops; from tkbuild.runtime.torch_ops import register_torch_ops; print(len(register_torch_ops()), 'ops')"
if "$venv/bin/python" -m pip list | grep -iE '^(tilelang|pyyaml|click|nvidia-cuda-nvcc) '; then
  echo "the serving environment holds build packages" >&2
  exit 1
fi
