#!/bin/bash
# SPDX-License-Identifier: GPL-2.0
#
# kunit.sh: what came of the module's KUnit tests, which ran when it was loaded. On a kernel with
# KUnit and the words kunit.enable=1 kunit.filter_glob=metaroce* (without the latter the
# kernel's own tests run as well, before it boots).
set -uo pipefail
cd "$(dirname "$0")" || exit
. ./lib.sh
results=/sys/kernel/debug/kunit
# A network namespace of `ip netns` has a /sys of its own.
[ -d $results ] || mount -t debugfs none /sys/kernel/debug
modprobe "$KIND"

# lines: a result of each test, of all suites.
lines() { sed -nE 's/^ +((not )?ok) [0-9]+ ([a-z0-9_]+)/\1 \3/p' $results/"$KIND"_*/results; }
suites() { for s in $results/"$KIND"_*; do [ ! -e "$s/results" ] || echo "${s##*/}"; done; }

plan "$(($(lines | wc -l) + 2))"
# What ran at all: a test that is not there cannot fail.
ran() {
    suites
    [ "$(suites | wc -l)" -ge 9 ] || { echo "suites are missing: does this kernel have KUnit, and kunit.enable=1?"; return 1; }
}
run_case ran
# Each test that is made for KUnit and cargo is called by a suite.
none_forgotten() {
    local forgotten
    forgotten=$(grep -rhA1 --include='*.rs' 'cfg_attr(test, test)' ../rust/proto |
        sed -n 's/.*fn \([a-z0-9_]*\)().*/\1/p' | sort | comm -23 - <(lines | sed 's/.* //' | sort))
    [ -z "$forgotten" ] || { echo "not in rust/kernel_ext/kunit.rs: $forgotten"; return 1; }
}
run_case none_forgotten
while read -r word name rest; do
    case "$word $name" in
        "not ok") not_ok "$rest" ;;
        *" # SKIP"*) skip "$name" ;;
        *) ok "$name" ;;
    esac
done < <(lines)
finish
