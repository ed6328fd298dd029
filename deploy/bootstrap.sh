#!/bin/sh
# Makes .venv with everything that the lock file names. Run by make; safe to run again; does nothing when up to date.
# Needs a Python 3.12 or later somewhere: $EXEAT_PYTHON, on the PATH, under pyenv, or known to uv.
set -eu
cd "$(dirname "$0")/.."

say() { printf 'exeat: %s\n' "$*" >&2; }

good() { "$1" -I -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; }

find_python() {
    if [ -n "${EXEAT_PYTHON:-}" ]; then
        if good "$EXEAT_PYTHON"; then echo "$EXEAT_PYTHON"; return 0; fi
        say "EXEAT_PYTHON=$EXEAT_PYTHON is not a Python 3.12 or later with venv"
        return 1
    fi
    for name in python3.13 python3.14 python3.12 python3; do
        path=$(command -v "$name" 2>/dev/null) && good "$path" && { echo "$path"; return 0; }
    done
    root=${PYENV_ROOT:-$(pyenv root 2>/dev/null || echo "$HOME/.pyenv")}
    for path in "$root"/versions/3.13*/bin/python "$root"/versions/3.14*/bin/python "$root"/versions/3.12*/bin/python; do
        [ -x "$path" ] && good "$path" && { echo "$path"; return 0; }
    done
    if command -v uv >/dev/null 2>&1; then
        path=$(uv python find '>=3.12' 2>/dev/null) && good "$path" && { echo "$path"; return 0; }
    fi
    return 1
}

stamp=.venv/.exeat-installed
want=$(cat requirements.lock pyproject.toml | cksum)
if [ -x .venv/bin/python ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ] && .venv/bin/python -I -c 'import exeat, audit' 2>/dev/null; then
    exit 0
fi

python=$(find_python) || {
    say "no Python 3.12 or later was found (looked at EXEAT_PYTHON, the PATH, pyenv and uv)."
    say "install one, for example with 'uv python install 3.13' or 'pyenv install 3.13', and run this again."
    exit 1
}
say "using $("$python" -V) at $python"
if ! { [ -x .venv/bin/python ] && good .venv/bin/python; }; then
    say "making .venv"
    rm -rf .venv
    "$python" -m venv .venv || { say "the virtual environment could not be made (on Debian: apt install python3-venv)"; exit 1; }
fi
say "installing locked dependencies into .venv (the first time takes a minute)"
.venv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock || {
    say "pip could not install the locked dependencies; see its message above (is a package index reachable?)"
    exit 1
}
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable . || {
    say "the project itself could not be installed into .venv; see pip's message above"
    exit 1
}
printf '%s' "$want" > "$stamp"
say "ready"
