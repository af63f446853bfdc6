"""A GGUF in another format, by llama.cpp's own quantiser: ``make_gguf.py SOURCE TARGET FORMAT``.

Runs in llama.cpp's environment.
"""

import os
import sys

import llama_cpp as lib


def main(source: str, target: str, name: str) -> None:
    params = lib.llama_model_quantize_default_params()
    params.ftype = getattr(lib, f"LLAMA_FTYPE_MOSTLY_{name}")
    params.allow_requantize = True
    partial = f"{target}.partial"
    if lib.llama_model_quantize(source.encode(), partial.encode(), params) != 0:
        raise SystemExit(f"{source} could not be made into {name}")
    os.replace(partial, target)


if __name__ == "__main__":
    main(*sys.argv[1:])
