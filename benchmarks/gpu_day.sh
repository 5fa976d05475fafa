#!/usr/bin/env bash
# Installs wheels into a virtual environment beside the machine's own PyTorch, without network, then runs the GPU day.
#
#   bash benchmarks/gpu_day.sh WHEELS [OPTION …]     # e.g. wheels --data fox
#
# WHEELS is a folder of wheels, or of folders of wheels, as benchmarks/collect_wheels.py makes it; without network a
# machine gets it in parts. OPTION … goes to benchmarks/gpu_day.py. PYTHON names the Python that has PyTorch (python3 by
# default), VENV the environment to make (.venv-gpu).
set -euo pipefail
cd "$(dirname "$0")/.."
wheels=${1:?"give the folder of wheels"}; shift
python=${PYTHON:-python3}
venv=${VENV:-.venv-gpu}

if [ ! -x "$venv/bin/ns-train" ]; then
    # Without pip: the machine's own installs into it.
    "$python" -m venv --without-pip --system-site-packages "$venv"
    # The Python that has PyTorch may be a virtual environment itself, whose packages the new one would not see.
    "$python" - "$venv" <<'PYTHON'
import site, sys, sysconfig
from pathlib import Path
version = f"python{sys.version_info.major}.{sys.version_info.minor}"
mine = sysconfig.get_paths()["purelib"]
Path(sys.argv[1], "lib", version, "site-packages", "zz_machine.pth").write_text(f"{mine}\n")
PYTHON
    # gsplat with kernels (benchmarks/build_kernels.py) instead of the one without.
    built=$(find "$wheels" -name 'gsplat-*-cp*.whl')
    mapfile -t found < <(find "$wheels" -name '*.whl' ${built:+! -name 'gsplat-*-none-any.whl'})
    "$python" -m pip --python "$venv/bin/python" install --quiet --no-index --no-deps --no-compile --no-cache-dir \
        --ignore-installed "${found[@]}"
    # This tree, with its entry points. Its build needs setuptools, which the machine has.
    "$python" -m pip --python "$venv/bin/python" install --quiet --no-index --no-deps --no-build-isolation --editable .
fi
# PyTorch looks for CUDA's headers beside the folder of nvcc, which may be a wrapper elsewhere.
if [ -z "${CUDA_HOME:-}" ] && [ -f /usr/local/cuda/include/cuda_runtime.h ]; then
    export CUDA_HOME=/usr/local/cuda
fi
room=$(find "$wheels" -type d -name test-room | head -n 1)
if [ -n "$room" ]; then
    export F3RM_EXT_TEST_ROOM="$room"
fi
export PATH="$PWD/$venv/bin:$PATH"
exec "$venv/bin/python" benchmarks/gpu_day.py "$@"
