#!/usr/bin/env bash
# Audits what Turnwire is made of. Needs a network; uv for the first two steps,
# and for the last one a Python with the extra `dev`.
#
#   audit    known holes in what requirements.lock pins (pip-audit; needs the advisory database)
#   wheel    two builds are the same file, and no .pth is in it
#   lowest   the tests pass with the lowest versions that pyproject.toml allows; LOWEST_TESTS says
#            which tests, by default those that the libraries matter to
#
# Without arguments, all three; the exit status is 0 if none of them found anything.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

audit() {
  local lock
  for lock in requirements.lock requirements-build.lock; do
    # Where the index is a mirror that has no advisories, --strict makes that an error, not a pass.
    uv tool run pip-audit --strict --require-hashes --disable-pip --progress-spinner off -r "$lock"
  done
}

wheel() {
  local n
  export SOURCE_DATE_EPOCH=1700000000
  for n in 1 2; do uv build -q --wheel -o "$work/$n" .; done
  cmp "$work"/1/*.whl "$work"/2/*.whl
  if unzip -l "$work"/1/*.whl | grep '\.pth$'; then return 1; fi
}

lowest() {
  python3 >"$work/lowest.txt" <<'END'
import re, tomllib
with open("pyproject.toml", "rb") as file:
    wanted = tomllib.load(file)["project"]["dependencies"]
for line in wanted:
    print(re.sub(r">=\s*([\w.]+)", r"==\1", line, count=1))
END
  # They come before those of the environment. The floors of the tests' own tools are not in question.
  python3 -m pip install -q --target "$work/lowest" -r "$work/lowest.txt"
  # shellcheck disable=SC2086  # several words
  PYTHONPATH=$work/lowest python3 -m pytest ${LOWEST_TESTS:-tests/hostile tests/core tests/downstream tests/upstream tests/observe}
}

for step in "${@:-audit wheel lowest}"; do
  for each in $step; do "$each"; done
done
