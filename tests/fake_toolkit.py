"""A CUDA toolkit of shell scripts, and cubins made by hand: the build side is tested without any compiler."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from tkbuild.toolchain import Toolchain, find

_NOTE = b"\0ptxas\0-v  -arch sm_%s -m 64 \0"
_DRYRUN = r"""
#$ CICC_PATH=$ROOT/nvvm/bin
#$ "$HOST" $FLAGS -E -x c++ -D__NVCC__ -include "cuda_runtime.h" -m64 "/somewhere/kernel.cu" -o "./kernel.cpp1.ii"
#$ "$CICC_PATH/cicc" --orig_src_path_name "/somewhere/kernel.cu" "./kernel.cpp1.ii" -o "./kernel.ptx"
#$ ptxas -arch=$ARCH -v "./kernel.ptx" -o "kernel.cubin"
"""


def make_cubin(
    arch: str = "sm_90a", kernels: tuple[str, ...] = ("kernel_kernel",), extra_section: str = "", machine: int = 190
) -> bytes:
    """Return a 64-bit ELF file with the parts of a cubin that tkbuild reads."""
    strings = b"\0" + b"".join(name.encode() + b"\0" for name in kernels)
    symbols = bytes(24)
    for name in kernels:
        symbols += struct.pack("<IBBHQQ", strings.index(name.encode()), 0x12, 0x10, 5, 0, 64)
    digits = arch.removeprefix("sm_")
    bodies = [
        ("", 0, b"", 0),
        (".shstrtab", 3, b"", 0),
        (".strtab", 3, strings, 0),
        (".symtab", 2, symbols, 2),
        (".note.nv.tkinfo", 7, _NOTE % digits.encode(), 0),
        *((f".text.{name}", 1, bytes(64), 0) for name in kernels),
        *([(extra_section, 1, b"x", 0)] if extra_section else []),
    ]
    names = b"".join(name.encode() + b"\0" for name, *_ in bodies)
    bodies[1] = (".shstrtab", 3, names, 0)
    offset, headers, content = 64, b"", b""
    place = 0
    for name, kind, body, link in bodies:
        headers += struct.pack(
            "<IIQQQQIIQQ", place, kind, 0, 0, offset + len(content), len(body), link, 0, 1, 24 if kind == 2 else 0
        )
        content += body
        place += len(name) + 1
    number = int(digits.rstrip("af"))
    ident = b"\x7fELF\x02\x01\x01\x41\x08" + bytes(7)
    header = struct.pack(
        "<16sHHIQQQIHHHHHH", ident, 2, machine, 1, 0, 0, 64 + len(content), 0x6000002 | number << 8, 64, 56, 0, 64, len(bodies), 1
    )
    return header + content + headers


@dataclass(frozen=True)
class FakeToolkit:
    """The toolkit at ``root`` and what its tools do, set by writing to files: see ``set_mode`` and ``calls``."""

    root: Path

    @classmethod
    def create(cls, root: Path, *, release: str = "13.5.37", ptxas_release: str = "", header: int = 13050) -> FakeToolkit:
        """Write the scripts."""
        for folder in ("bin", "nvvm/bin", "include", "cubins"):
            (root / folder).mkdir(parents=True)
        (root / "include/cuda.h").write_text(f"#define CUDA_VERSION {header}\n")
        (root / "include/cuda_runtime.h").write_text("// runtime\n")
        (root / "bin/nvcc.profile").write_text("TOP = ..\n")
        for arch in ("sm_90a", "sm_100a"):
            (root / "cubins" / arch).write_bytes(make_cubin(arch))
        kit = cls(root)
        kit.set_mode("ok")
        kit._script("bin/nvcc", _version(release) + _nvcc(root))
        kit._script("bin/ptxas", _version(ptxas_release or release) + _ptxas(root))
        kit._script("bin/cudafe++", "exit 0")
        kit._script("nvvm/bin/cicc", _last_argument() + f'echo cicc >> "{root}/calls"\ncp kernel.cpp1.ii "$last"')
        kit._script("bin/g++", '[ "$1" = -dumpfullversion ] && { echo 12.2.0; exit 0; }\n' + _last_argument() + _gxx(root))
        return kit

    def _script(self, name: str, body: str) -> None:
        path = self.root / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    def set_mode(self, mode: str) -> None:
        """Choose what ptxas does: ok, spill, empty, half, other_arch, nothing, ptx, fail, crash, killed, hang."""
        (self.root / "mode").write_text(mode)

    def calls(self, tool: str) -> int:
        """How often a tool ran."""
        path = self.root / "calls"
        return path.read_text().split().count(tool) if path.exists() else 0

    def toolchain(self) -> Toolchain:
        """Find it as tkbuild does."""
        return find(self.root, host_compiler=self.root / "bin/g++")


def _version(release: str) -> str:
    short = release.rsplit(".", 1)[0]
    return f'[ "$1" = --version ] && {{ echo "Cuda compilation tools, release {short}, V{release}"; exit 0; }}\n'


def _last_argument() -> str:
    return 'for last in "$@"; do :; done\n'


def _nvcc(root: Path) -> str:
    lines = _DRYRUN.strip().replace("$ROOT", str(root)).replace("$HOST", str(root / "bin/g++"))
    lines = lines.replace('"$CICC_PATH', '"\\$CICC_PATH').replace("#$ ", "#\\$ ")
    get_arch = 'for word in "$@"; do case $word in -gencode=*) ARCH=${word##*code=};; esac; done\n'
    return get_arch + 'FLAGS="-DFAKE"\ncat >&2 <<END\n' + lines + "\nEND"


def _gxx(root: Path) -> str:
    return f"""echo g++ >> "{root}/calls"
grep -q '#error' kernel.cu && {{ echo "kernel.cu:1: error: #error" >&2; exit 1; }}
cp kernel.cu "$last" """


def _ptxas(root: Path) -> str:
    return (
        _last_argument()
        + f"""
root="{root}"
echo ptxas >> "$root/calls"
arch=${{1#-arch=}}
read -r mode < "$root/mode" || :
case $mode in
  hang) trap '' TERM; sleep 300 & sleep 300 ;;
  fail) head -c 100 "$root/cubins/$arch" > "$last"; echo "ptxas fatal: no" >&2; exit 1 ;;
  crash) kill -SEGV $$ ;;
  killed) kill -KILL $$ ;;
  empty) : > "$last"; exit 0 ;;
  half) head -c 200 "$root/cubins/$arch" > "$last" ;;
  nothing) exit 0 ;;
  other_arch) [ $arch = sm_90a ] && other=sm_100a || other=sm_90a; cp "$root/cubins/$other" "$last" ;;
  ptx) cp "$root/cubins/ptx" "$last" ;;
  *) cat "$root/cubins/$arch" kernel.ptx > "$last" ;;
esac
spill=0; [ "$mode" = spill ] && spill=16
cat >&2 <<END
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'kernel_kernel' for '$arch'
ptxas info    : Function properties for kernel_kernel
    $spill bytes stack frame, $spill bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 1024 bytes smem
ptxas info    : Compile time = $$.1 ms
END"""
    )
