"""Cold compile of a profile: `tkbuild compile` against `tilelang.par_compile` on the same kernels, with as many workers.

    python tests/benchmarks/compile_speed.py [--arch sm_90a] [--jobs 2] [PATTERN]...

Both start from nothing: an empty store here, empty TileLang caches there, each in fresh processes. par_compile gets the
kernels as PrimFuncs, so rendering is not in its time, importing TileLang is in both.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_PEER = """
import json, sys, time
started = time.monotonic()
from pathlib import Path
import tilelang
from tvm.target import Target
from tkbuild.lower import _load_kernel
jobs = json.loads(Path(sys.argv[1]).read_text())
target = Target({"kind": "cuda", "arch": sys.argv[2]})
by_configs = {}
for job in jobs:
    by_configs.setdefault(json.dumps(job["pass_configs"]), []).append(_load_kernel(job["source"], None, target))
for configs, kernels in by_configs.items():
    tilelang.par_compile(kernels, target=target, num_workers=int(sys.argv[3]), pass_configs=json.loads(configs))
print(time.monotonic() - started)
"""


def main() -> None:
    """Run both and print the times and their ratio as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("patterns", nargs="*", default=["*"])
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    ids = _tkbuild("list", *arguments.patterns, "--arch", arguments.arch).split()
    jobs = [_job(variant) for variant in ids]
    with tempfile.TemporaryDirectory() as folder:
        ours = _timed("compile", *ids, "--arch", arguments.arch, "-j", str(arguments.jobs), "--store", f"{folder}/store")
        theirs = _peer(Path(folder), jobs, arguments.arch, arguments.jobs)
    print(
        json.dumps(
            {"kernels": len(ids), "tkbuild_s": round(ours, 1), "par_compile_s": round(theirs, 1), "ratio": round(theirs / ours, 2)}
        )
    )


def _job(variant: str) -> dict[str, object]:
    from tkbuild.specs import load_specs
    from tkbuild.variants import parse_id

    spec = parse_id(variant, load_specs(ROOT / "kernel_specs")).spec
    return {"source": _tkbuild("explain", variant, "--source"), "pass_configs": dict(spec.pass_configs)}


def _peer(folder: Path, jobs: list[dict[str, object]], arch: str, workers: int) -> float:
    (folder / "jobs.json").write_text(json.dumps(jobs))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TILELANG_CACHE_DIR": f"{folder}/tilelang", "TVM_CACHE_DIR": f"{folder}/tvm"}
    env["CUDA_HOME"] = str(_cuda_home())
    env["PATH"] = f"{_cuda_home()}/bin:{env['PATH']}"
    command = [sys.executable, "-c", _PEER, str(folder / "jobs.json"), arch, str(workers)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode:
        sys.exit(f"par_compile failed:\n{done.stderr[-3000:]}")
    return float(done.stdout.split()[-1])


def _cuda_home() -> Path:
    from tkbuild import toolchain

    return toolchain.find().root


def _timed(*arguments: str) -> float:
    started = time.monotonic()
    _tkbuild(*arguments)
    return time.monotonic() - started


def _tkbuild(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "tkbuild", *arguments], capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        sys.exit(f"tkbuild {' '.join(arguments)} failed:\n{done.stderr[-3000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
