"""Record what PyTorch's own allocator does with the scenarios of `allocator_streams`. Needs no device.

    pip download --no-deps torch==2.13.0 && unzip torch-2.13.0-*.whl -d WHEEL    # one that is built for CUDA 13
    python tests/predict/allocator_recorded/record.py WHEEL/torch CUDA/include > torch-2.13.0.json

`libc10_cuda.so` of the wheel runs over `device.c`, a device that only counts bytes. A g++ and the headers of the CUDA
toolkit are needed.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from allocator_streams import scenarios  # noqa: E402

from orchestrator.predict.allocator import Workload  # noqa: E402
from orchestrator.predict.segments import UNIT_BYTES  # noqa: E402

NO_END_BYTES = 1 << 40


def build(torch: Path, cuda_include: Path, folder: Path) -> Path:
    """The program that serves requests, and the two libraries that it believes to be CUDA's."""
    versions = folder / "versions"
    versions.write_text("libcudart.so.13 { global: *; };")
    shared = ["gcc", "-shared", "-fPIC", "-w", f"-I{cuda_include}", "-o"]
    runtime = [f"-Wl,-soname,libcudart.so.13,--version-script={versions}"]
    subprocess.run([*shared, folder / "libcudart.so.13", HERE / "device.c", *runtime], check=True)
    subprocess.run([*shared, folder / "libnvidia-ml.so.1", HERE / "management.c"], check=True)
    includes = [f"-I{torch / 'include'}", f"-I{cuda_include}"]
    libraries = [f"-L{torch / 'lib'}", "-lc10_cuda", "-lc10", f"-L{folder}", "-l:libcudart.so.13"]
    program = folder / "serve"
    subprocess.run(["g++", "-std=c++20", "-w", *includes, HERE / "serve.cpp", "-o", program, *libraries], check=True)
    return program


def requests(workload: Workload) -> list[tuple[int, int, int]]:
    """(storage, bytes, step), with a number of its own for every storage of every step."""
    asked: list[tuple[int, int, int]] = []
    first = 0
    for step, phase in enumerate(workload.phases):
        if step > 1 and workload.empties_cache:
            asked.append((0, 0, step))
        for operation in phase.operations:
            number = first + abs(operation)
            size = phase.units[abs(operation) - 1] * UNIT_BYTES
            asked.append((number, size, step) if operation > 0 else (-number, 0, step))
        first += len(phase.units)
    return asked


def record(program: Path, libraries: str, workload: Workload, capacity_bytes: int | None) -> list[int]:
    """[step of the failed request or -1, peak allocated, peak reserved, reserved at the end, retries]."""
    asked = requests(workload)
    pairs = np.array([(storage, size) for storage, size, _ in asked], dtype=np.int64)
    setting = f"expandable_segments:{workload.expandable_segments}"
    done = subprocess.run(
        [program],
        input=np.int64(capacity_bytes or NO_END_BYTES).tobytes() + pairs.tobytes(),
        env=os.environ | {"LD_LIBRARY_PATH": libraries, "PYTORCH_ALLOC_CONF": setting},
        capture_output=True,
        check=True,
    )
    failed, *figures = map(int, done.stdout.split())
    return [asked[failed][2] if failed >= 0 else -1, *figures]


def main() -> None:
    """Print the record as JSON, one scenario a line."""
    torch, cuda_include = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        program = build(torch, cuda_include, Path(folder))
        libraries = f"{torch / 'lib'}:{folder}"
        recorded = {name: record(program, libraries, *scenario) for name, scenario in scenarios().items()}
    lines = [f"{json.dumps(name)}: {json.dumps(figures)}" for name, figures in recorded.items()]
    print("{\n" + ",\n".join(lines) + "\n}")


if __name__ == "__main__":
    main()
