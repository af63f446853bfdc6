"""Building the library with the system's C++ compiler, once per source and machine."""
import hashlib, os, subprocess, tempfile
from pathlib import Path
SRC = Path(__file__).parent / "src"
__all__ = ["build_library"]
def build_library() -> Path:
    h = hashlib.sha256()
    for f in sorted(SRC.iterdir()): h.update(f.read_bytes())
    flags = ["-O3","-march=native","-ffp-contract=off","-fPIC","-shared","-std=c++20","-Wno-psabi","-pthread", *os.environ.get("KF","").split()]
    h.update(" ".join(flags).encode())
    out = Path(tempfile.gettempdir())/f"mk-{h.hexdigest()[:16]}.so"
    if not out.exists(): subprocess.run(["g++",*flags,str(SRC/"decoder.cpp"),"-o",str(out)],check=True)
    return out
