#!/usr/bin/env bash
# The steps of the release workflow, each by itself: .github/release/steps.sh STEP DIST [PYTHON…]
#   build   makes the wheel of this platform and the source distribution; needs build, on Linux auditwheel and patchelf
#   check   holds their metadata to the index's rules, and prints sizes; needs twine
#   wheel   installs the wheel with each PYTHON where no compiler is, and runs the README's job with its kernel
#   source  installs the source distribution with a compiler and without, and runs the job with both
#   all     these four, in this order
set -euo pipefail
step=$1 dist=$(mkdir -p "$2" && cd "$2" && pwd)
shift 2
[ $# -gt 0 ] || set -- python3
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
here=$PATH

build() {
  python3 -m build --quiet --sdist --outdir "$dist" .
  LORA_TOOL_KERNEL=require python3 -m build --quiet --wheel --outdir "$work/built" .
  if [ "$(uname)" = Linux ]; then
    python3 -m auditwheel repair --wheel-dir "$dist" "$work"/built/*.whl
  else
    cp "$work"/built/*.whl "$dist"
  fi
}

check() {
  python3 -m twine check --strict "$dist"/*
  wc -c "$dist"/*
}

# installs into "$venv" with the programs of that and of the path $1
install() { env PATH="$venv/bin${1:+:$1}" "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "${@:2}"; }

# what `env` says of the kernel must begin with $1; then the README's job
job() {
  "$venv/bin/lora-tool" env | grep -x "kernel  *$1.*"
  "$venv/bin/lora-tool" merge --rm fixtures/reward-qwen2/adapter -o "$venv/reward-model" | tail -n 3
}

fresh() {
  venv=$work/$2-$(basename "$1")
  "$1" -m venv "$venv"
  "$venv/bin/python" --version
}

wheel() {
  for python; do
    fresh "$python" wheel
    install "" --no-index --no-deps --only-binary :all: --find-links "$dist" lora-tool
    install "" --only-binary :all: lora-tool # what it depends on
    LORA_TOOL_KERNEL=require job 'kernel '
  done
}

source_() {
  for python; do
    fresh "$python" compiled
    LORA_TOOL_KERNEL=require install "$here" "$dist"/*.tar.gz
    job 'kernel '
    fresh "$python" numpy
    install "" "$dist"/*.tar.gz
    job 'none; numpy'
  done
}

case $step in
  build | check) "$step" ;;
  wheel) wheel "$@" ;;
  source) source_ "$@" ;;
  all) build && check && wheel "$@" && source_ "$@" ;;
  *) sed -n '2,7s/^# //p' "$0" && exit 2 ;;
esac
