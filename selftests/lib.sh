# SPDX-License-Identifier: GPL-2.0
# shellcheck shell=bash
# lib.sh: shared by the scripts of this folder; to be sourced. They run as root inside a test
# machine (qemu-test/run --help describes the environment) or on any machine with two devices.

: "${KIND:=metaroce}"            # link type under test
: "${DEV:=${RDMA_DEV:-mroce0}}"  # device under test

ktap_number=0 ktap_passed=0 ktap_failed=0 ktap_skipped=0

note() { printf '%s\n' "$*" | sed 's/^/# /'; }

# plan N: head of a KTAP report.
plan() { printf 'KTAP version 1\n1..%s\n' "$1"; }

ok() { ktap_number=$((ktap_number + 1)) ktap_passed=$((ktap_passed + 1)); echo "ok $ktap_number $*"; }
not_ok() { ktap_number=$((ktap_number + 1)) ktap_failed=$((ktap_failed + 1)); echo "not ok $ktap_number $*"; }
skip() { ktap_number=$((ktap_number + 1)) ktap_skipped=$((ktap_skipped + 1)); echo "ok $ktap_number $1 # SKIP ${2:-}"; }

# finish: sums; the exit status of a script: 0, 1 with failures, 4 when everything was skipped.
finish() {
    echo "# totals: pass:$ktap_passed fail:$ktap_failed skip:$ktap_skipped"
    [ "$ktap_failed" = 0 ] || exit 1
    [ "$ktap_passed" != 0 ] || exit 4
    exit 0
}

# slab_tolerance: KiB by which unreclaimable slab may grow while nothing leaks. A kernel that checks
# itself books every object and keeps freed ones for a while; it looks for leaks itself.
slab_tolerance() { case ${KERNEL:-} in *debug*) echo 16384 ;; *) echo 1024 ;; esac; }

# run_case NAME: calls the function NAME in a subshell: status 0 passes, 4 skips, others fail.
# What it prints is shown as notes.
run_case() {
    local name=$1 out status begun=$SECONDS
    out=$( (set -e; "$name") 2>&1)
    status=$?
    case $status in
        0) [ -z "$out" ] || note "$out"; ok "$name # $((SECONDS - begun)) s" ;;
        4) skip "$name" "$out" ;;
        *) note "$out"; note "status $status"; not_ok "$name" ;;
    esac
}

# busywait SECONDS COMMAND...: repeats COMMAND until it succeeds; says what it waited for when not.
busywait() {
    local deadline=$((SECONDS + $1))
    shift
    while ! "$@" >/dev/null 2>&1; do
        if [ "$SECONDS" -ge "$deadline" ]; then
            echo "waited in vain for: $*"
            return 1
        fi
        sleep 0.05
    done
}

# has ARGUMENTS-OF-GREP: grep -q, but reads all of its input: under pipefail a writer that ends
# by SIGPIPE would be a failure.
has() { grep "$@" >/dev/null; }

# grown FILE NUMBER: the number in FILE is above NUMBER.
grown() { [ "$(cat "$1")" -gt "$2" ]; }

# refused ERRNO-TEXT COMMAND...: COMMAND fails and its message contains the text.
refused() {
    local text=$1 out
    shift
    if out=$("$@" 2>&1); then
        echo "'$*' was not refused"
        return 1
    fi
    case $out in *"$text"*) ;; *) echo "'$*' said '$out' instead of '$text'"; return 1 ;; esac
}

# path_bytes DEVICE: "PATH BYTES" for each path on which the device has sent.
# The one place that knows where a provider keeps these numbers.
path_bytes() {
    local f n
    for f in "/sys/class/infiniband/$1/ports/1/hw_counters"/path*_tx_bytes; do
        [ -e "$f" ] || continue
        n=${f##*/path}
        echo "${n%_tx_bytes} $(cat "$f")"
    done | sort -n
}

# counter DEVICE NAME: a hardware counter, 0 where there is none of that name.
counter() { cat "/sys/class/infiniband/$1/ports/1/hw_counters/$2" 2>/dev/null || echo 0; }

# share_table BEFORE AFTER: the share of each path in what was sent between two outputs of path_bytes.
share_table() {
    join <(sort "$1") <(sort "$2") | sort -n | awk '
        BEGIN { n = 0 }
        { sent[n] = $3 - $2; path[n] = $1; total += $3 - $2; n++ }
        END {
            if (total == 0) { print "no bytes on any path"; exit }
            printf "path        bytes   share\n"
            for (i = 0; i < n; i++) if (sent[i] > 0) {
                bar = sprintf("%*s", int(sent[i] * 400 / total + 0.5), ""); gsub(/ /, "#", bar)
                printf "%4d %12d  %5.1f %%  %s\n", path[i], sent[i], sent[i] * 100 / total, bar
                used++
            }
            printf "%d paths, %.1f MiB\n", used, total / 1048576
        }'
}

# refuse_packets PERCENT: on a kernel with fault injection, so many of the allocations of packets fail
# from now on where nobody may wait for memory: those of the driver, and those of TCP in an interrupt.
# refused_packets: how many have. False on other kernels.
refuse_packets() {
    local cache inject=/sys/kernel/debug/failslab
    # A network namespace of `ip netns` has a /sys of its own.
    mountpoint -q /sys/kernel/debug || mount -t debugfs none /sys/kernel/debug 2>/dev/null || :
    [ -e $inject/cache-filter ] || return 1
    if [ "$1" = 0 ]; then
        echo 0 >$inject/probability
        echo N >$inject/cache-filter
        return
    fi
    for cache in skbuff_head_cache skbuff_small_head skbuff_fclone_cache; do
        [ ! -e "/sys/kernel/slab/$cache/failslab" ] || echo 1 >"/sys/kernel/slab/$cache/failslab"
    done
    echo Y >$inject/cache-filter
    echo Y >$inject/ignore-gfp-wait
    echo 0 >$inject/verbose
    echo 1000000 >$inject/times
    echo "$1" >$inject/probability
}
refused_packets() { echo $((1000000 - $(cat /sys/kernel/debug/failslab/times))); }

# median: of the numbers on stdin.
median() { sort -g | awk '{ v[NR] = $1 } END { if (NR) print (NR % 2) ? v[(NR + 1) / 2] : (v[NR / 2] + v[NR / 2 + 1]) / 2; else print 0 }'; }

# value KEY: that value of the RESULT lines on stdin.
value() { sed -n "s/^RESULT .*[ ]$1=\([^ ]*\).*/\1/p"; }

# gid_of NS DEVICE BYTES: in that namespace, the index of the device's RoCE v2 GID of these bytes,
# written as sysfs does.
gid_of() {
    ip netns exec "$1" bash -c '
        cd "/sys/class/infiniband/$1/ports/1" || exit
        for f in gids/*; do
            [ "$(cat "$f")" = "$2" ] || continue
            [ "$(cat "gid_attrs/types/${f#gids/}" 2>/dev/null)" = "RoCE v2" ] && echo "${f#gids/}" && exit 0
        done
        exit 1' gid_of "$2" "$3"
}
