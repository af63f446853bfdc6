# Sourced by the other scripts: goes to the root of the repository, makes .venv when it is missing, installs the project with
# pinned versions, and exports the settings every run uses. Does nothing but a hash when all that is already done.
# Environment: PYTHON names the interpreter to build .venv with (3.11 or newer).

cd "$(dirname "${BASH_SOURCE[0]}")/.."

export LITELLM_LOCAL_MODEL_COST_MAP="${LITELLM_LOCAL_MODEL_COST_MAP:-True}" # no price list from the network
export GRADIO_ANALYTICS_ENABLED="${GRADIO_ANALYTICS_ENABLED:-False}"

venv_python=.venv/bin/python
stamp_file=.venv/.setup-stamp

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3.11 python3.12 python3.13 python3 python; do
        if "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "Python 3.11 or newer (with its venv module) was not found. Install it, or name it: PYTHON=/path/to/python3.11 $0" >&2
    return 1
}

setup_stamp() { # what the installed state depends on, as one hash
    "$venv_python" - <<'PYTHON'
import hashlib, pathlib, sys

digest = hashlib.sha256(f"{sys.version} {pathlib.Path.cwd()}".encode())
for name in ("pyproject.toml", "constraints.txt", "scripts/_setup.sh"):
    digest.update(pathlib.Path(name).read_bytes())
print(digest.hexdigest())
PYTHON
}

setup() {
    if ! "$venv_python" -c '' 2>/dev/null; then
        local python
        python="$(find_python)"
        echo "setup: making .venv with $("$python" --version) ..." >&2
        "$python" -m venv --clear .venv
    fi
    local stamp
    stamp="$(setup_stamp)"
    if [[ -f $stamp_file && "$(cat "$stamp_file")" == "$stamp" ]]; then
        return
    fi
    echo "setup: installing the pinned packages into .venv (minutes the first time) ..." >&2
    "$venv_python" -m pip --version >/dev/null 2>&1 || "$venv_python" -m ensurepip --upgrade >/dev/null
    "$venv_python" -m pip install -qq --disable-pip-version-check --upgrade 'pip>=25.1' # --group is new in 25.1
    "$venv_python" -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[litellm,ui,serve,prometheus,kv-events,otel]' --group dev
    echo "$stamp" >"$stamp_file"
    echo "setup: done" >&2
}

with_setup_lock() { # two scripts started at once must not install into the same .venv
    if command -v flock >/dev/null; then
        (flock 9 && setup) 9>.setup.lock
    else
        setup
    fi
}

with_setup_lock
