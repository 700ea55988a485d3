#!/bin/bash
# SPDX-License-Identifier: GPL-2.0
#
# perftest.sh [--quick]: the public programs, unmodified: pingpong and perftest, over IPv4 and
# IPv6 GIDs. Runs on both hosts; host 2 reports. --quick shortens what repeats.
set -uo pipefail
cd "$(dirname "$0")" || exit
. ./lib.sh
quick=
[ "${1:-}" != --quick ] || quick=1
bw_n=20 lat_n=100
patience=900 # -a -n 100 moves 3.3 GB
[ -z "$quick" ] || patience=120
if [ -n "$quick" ]; then all="-s 65536"; else all=-a; fi
log=/tmp/perftest.$HOST.log # hosts may share /tmp

# NAME | GID class (4, 6) | COMMAND without device, GID index and address
list() {
    local p
    for g in 4 6; do
        echo "ibv_rc_pingpong|$g|ibv_rc_pingpong"
        echo "ibv_rc_pingpong_events|$g|ibv_rc_pingpong -e"
        echo "ibv_srq_pingpong|$g|ibv_srq_pingpong"
        echo "ibv_srq_pingpong_events|$g|ibv_srq_pingpong -e"
    done
    for p in write read send; do
        echo "${p}_bw_all|4|ib_${p}_bw $all -n $bw_n"
        echo "${p}_bw_all|6|ib_${p}_bw $all -n $bw_n"
        echo "${p}_bw_both_ways|4|ib_${p}_bw $all -n $bw_n -b"
        echo "${p}_bw_16_qps|4|ib_${p}_bw -s 65536 -n $bw_n -q 16"
        echo "${p}_bw_strict_order|4|ib_${p}_bw $all -n $bw_n --disable_pcie_relaxed"
        echo "${p}_lat_all|4|ib_${p}_lat $all -n $lat_n"
        echo "${p}_lat_all|6|ib_${p}_lat $all -n $lat_n"
        echo "${p}_lat_strict_order|4|ib_${p}_lat $all -n $lat_n --disable_pcie_relaxed"
    done
    for p in CMP_AND_SWAP FETCH_AND_ADD; do
        echo "atomic_bw_$p|4|ib_atomic_bw -A $p -n 200"
        echo "atomic_lat_$p|4|ib_atomic_lat -A $p -n $lat_n"
    done
    echo "atomic_bw_16_qps|4|ib_atomic_bw -n 100 -q 16"
    echo "send_bw_events|4|ib_send_bw -s 65536 -n $bw_n -e"
    echo "send_lat_events|4|ib_send_lat -s 64 -n $lat_n -e"
    echo "read_bw_events|4|ib_read_bw -s 65536 -n $bw_n -e"
    echo "read_lat_events|4|ib_read_lat -s 64 -n $lat_n -e"
    echo "atomic_bw_events|4|ib_atomic_bw -n 100 -e"
    echo "atomic_lat_events|4|ib_atomic_lat -n $lat_n -e"
    echo "send_bw_srq|4|ib_send_bw -s 65536 -n $bw_n --use-srq -q 4"
    echo "send_lat_srq|4|ib_send_lat -s 64 -n $lat_n --use-srq"
}

# The programs listen on 18515, perftest and pingpong alike.
listening() { ss -Hltn 'sport = :18515' | grep -q .; }
quiet() { ! listening; }

run_one() {
    local name=$1 class=$2 command=$3 gid peer address status result
    gid=$GID4 peer=${PEERS%% *} address=
    if [ "$class" = 6 ]; then
        if [ -z "${GID6:-}" ]; then
            [ "$HOST" != 2 ] || skip "${name}_ipv6" "no IPv6"
            return
        fi
        gid=$GID6
    fi
    case $command in
        # The programs exchange their numbers over IPv4; the data goes by the GID.
        ib_*) address="-d $DEV -x $gid -F" ;;
        *) address="-d $DEV -g $gid" ;;
    esac
    if [ "$HOST" = 1 ]; then
        busywait 20 quiet || :
        # shellcheck disable=SC2086
        timeout $patience $command $address >$log 2>&1 &
        local pid=$!
        busywait 20 listening || cat $log
        barrier "$name-$class-up"
        wait $pid
        status=$?
        barrier "$name-$class-end" $((patience + 20))
        [ "$status" = 0 ] || { note "$name: status $status"; explain; failed_here=1; }
    else
        barrier "$name-$class-up"
        # shellcheck disable=SC2086
        timeout $patience $command $address $peer >$log 2>&1
        status=$?
        # A client that fails leaves its server waiting.
        barrier "$name-$class-end" $((patience + 20))
        result="${name}_ipv$class"
        if [ "$status" = 0 ]; then
            ok "$result # $(summary)"
        else
            note "$command $address $peer: status $status"
            explain
            not_ok "$result"
        fi
    fi
}

# explain: what a failed program said, and how far it came.
explain() { { grep -iE 'fail|error|unable|could|status' $log; tail -2 $log; } | sed 's/^/# /'; }

# summary: the last line with numbers of a perftest or pingpong report.
summary() { grep -E '^ *[0-9]+ +[0-9]|usec/iter' $log | tail -1 | tr -s ' \t' ' ' | sed 's/^ //'; }

failed_here=
mapfile -t tests < <(list)
[ "$HOST" != 2 ] || plan ${#tests[@]}
for t in "${tests[@]}"; do
    IFS='|' read -r name class command <<<"$t"
    run_one "$name" "$class" "$command"
done
[ "$HOST" = 2 ] || exit ${failed_here:-0}
finish
