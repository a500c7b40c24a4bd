#!/usr/bin/env bash
# Trains, loses the machine between two writes and a bit on its disk, finds out what happened, mends
# all of it with one command, and trains on.
#
# Each command is shown as you would type it, with its exit status. The demo fails when a status or
# the pointer is not what it should be. DEMO_DIR (default: demo-run) is made anew.
set -euo pipefail
cd "$(dirname "$0")/.."
[[ ${VENV:-.venv} == /* ]] && venv=$VENV || venv=$PWD/${VENV:-.venv}
export PATH="$venv/bin:$PATH"
run=${DEMO_DIR:-demo-run}

say() { printf '\n# %s\n' "$*"; }

# expect STATUS COMMAND…: shows the command, runs it, shows its status, stops if it is another one.
expect() {
    local want=$1 status=0
    shift
    printf '\n$ %s\n' "$*"
    "$@" || status=$?
    printf '[exit %d]\n' "$status"
    if ((status != want)); then
        echo "demo: expected exit $want" >&2
        exit 1
    fi
}

show() {
    printf '\n$ %s\n' "$*"
    "$@"
}

pointer_is() {
    if ! grep -q "\"step\": *$1[,}]" <(tr -d '\n' <"$run/latest.json"); then
        echo "demo: the pointer should name step $1: $(cat "$run/latest.json")" >&2
        exit 1
    fi
}

rm -rf "$run"
say "A training run. The machine dies after step 60 is written, before the pointer moves (SIGKILL)."
expect 137 python -m trainer_core.demo "$run" --steps 100 --every 20 --crash-after-save 60
pointer_is 40

say "And one bit of a weight in that newest file changes on disk. torch would load it in silence."
show python - "$run/step_000000000060.pt" <<'END'
import sys, zipfile

path = sys.argv[1]
data = bytearray(open(path, "rb").read())
record = max(zipfile.ZipFile(path).infolist(), key=lambda record: record.file_size)
name, extra = (int.from_bytes(data[record.header_offset + at :][:2], "little") for at in (26, 28))
data[record.header_offset + 30 + name + extra + record.file_size // 2] ^= 0x40
open(path, "wb").write(data)
END

say "What is there?"
expect 1 ckpttool inspect "$run"

say "Which of it can be trusted?"
expect 1 ckpttool verify "$run"

say "What would mend it, and what would be lost?"
expect 1 ckpttool repair "$run"

say "Do that. The bit is found and turned back, and the pointer moves to the newest proven step."
expect 0 ckpttool repair "$run" --apply
pointer_is 60

say "Train on from there, to the end."
expect 0 python -m trainer_core.demo "$run" --steps 100 --every 20 --resume
pointer_is 100
expect 0 ckpttool verify "$run"
expect 0 ckpttool latest "$run"

printf '\ndemo: the file and the pointer were mended, and training went on to its end.\n'
