#!/bin/bash
# SPDX-License-Identifier: GPL-2.0
#
# bench.sh [--full | --short] [--rounds N] [--seconds N] [--losses "P..." | --no-loss]
#          [--loss-rounds N] [--loss-seconds N] [--raw FILE]
#
# metaroce (CRC on and off), rdma_rxe and TCP side by side in one boot, on the same pair of
# interfaces; runs on both hosts. The rounds are interleaved: each measures every driver once,
# so that what the machine does meanwhile meets all of them. The tables show medians over the
# rounds. Nothing here judges: a figure is for the reader.
#
#   (default)  5 rounds of 1 s a test; lossy links: 3 rounds of 3 s
#   --full     9 rounds of 2 s;        lossy links: 5 rounds of 10 s
#   --short    5 rounds of 2 s;        no lossy links
#   --rounds 0 lossy links only
#   --raw      the result lines of all rounds stay in FILE (of host 2)
set -euo pipefail
cd "$(dirname "$0")"
. ./lib.sh

rounds=5 seconds=1 losses="0 0.1 1 5 10" loss_rounds=3 loss_seconds=3 raw=/tmp/bench.raw
while [ $# -gt 0 ]; do
    case $1 in
        --full) rounds=9 seconds=2 loss_rounds=5 loss_seconds=10 ;;
        --short) rounds=5 seconds=2 losses= ;;
        --no-loss) losses= ;;
        --rounds) rounds=$2; shift ;;
        --seconds) seconds=$2; shift ;;
        --losses) losses=$2; shift ;;
        --loss-rounds) loss_rounds=$2; shift ;;
        --loss-seconds) loss_seconds=$2; shift ;;
        --raw) raw=$2; shift ;;
        *) echo "bench.sh: what is '$1'?" >&2; exit 2 ;;
    esac
    shift
done
shape="rate 400mbit delay 100us"
verbs_tests=write_bw,read_bw,send_bw,write_rate
peer=${PEERS%% *}
say() { [ "$HOST" != 2 ] || printf '%s\n' "$*"; }
: >"$raw.$HOST"

step=0
meet() { step=$((step + 1)); barrier "bench-$step"; }

# load VALUE: the module with crc=VALUE, and mroce0 on $NETDEV. Hosts that are namespaces of
# one machine share the module: host 1 loads it.
crc=
load() {
    [ "$crc" != "$1" ] || return 0
    rdma link delete "$DEV" 2>/dev/null || true
    meet
    if [ "$HOST" = 1 ] || [ "$LAYOUT" = machines ]; then
        ! grep -q '^metaroce ' /proc/modules || busywait 10 rmmod metaroce
        modprobe metaroce "crc=$1"
    fi
    meet
    rdma link add "$DEV" type metaroce netdev "$NETDEV"
    busywait 10 has_address "$DEV"
    crc=$1
    meet
}
# has_address DEVICE: a GID of $ADDR is there.
has_address() {
    local hex
    # shellcheck disable=SC2086
    hex=$(printf '%02x%02x:%02x%02x' ${ADDR//./ })
    grep -qs "ffff:$hex" "/sys/class/infiniband/$1/ports/1/gids/"*
}

# measure TAG DEVICE SECONDS TESTS: result lines with that tag; says so when it fails. Where a
# driver gives up (a QP in error), the test counts as zero.
measure() {
    local tag=$1 dev=$2 time=$3 tests=$4 t
    meet
    if GID4='' timeout 300 mroce-bench --dev "$dev" --seconds "$time" --warmup "$(warmup "$time")" \
        --tests "$tests" --tag "$tag" --wait 20 >"/tmp/bench.$HOST" 2>"/tmp/bench.$HOST.err"; then
        cat "/tmp/bench.$HOST" >>"$raw.$HOST"
    elif [ "$HOST" = 2 ]; then
        cat "/tmp/bench.$HOST" >>"$raw.$HOST"
        for t in ${tests//,/ }; do
            t=${t%%:*}
            grep -q "test=$t " "/tmp/bench.$HOST" || echo "RESULT test=$t tag=$tag MiBps=0 msgps=0 us_p50=0" >>"$raw.$HOST"
        done
        echo "$tag: $(cat "/tmp/bench.$HOST.err")"
    fi
}
# latencies WHO...: of each in turn, three times: it is what varies most, since two programs
# that poll share the processors with all else.
latencies() {
    local i who half
    half=$(awk -v s="$seconds" 'BEGIN { print s / 2 }')
    for i in 1 2 3; do
        for who; do
            case $who in
                rxe) measure rxe rxe0 "$half" write_lat ;;
                tcp) measure tcp "$DEV" "$half" tcp_lat ;;
                *) measure "$who" "$DEV" "$half" write_lat ;;
            esac
        done
    done
}
warmup() { awk -v s="$1" 'BEGIN { print (s < 5) ? s / 3 : 2 }'; }

# iperf SECONDS: TCP by iperf3, as the receiver counts it.
iperf() {
    meet
    if [ "$HOST" = 1 ]; then
        iperf3 -s -1 >/dev/null 2>&1 &
        busywait 10 listening || true
        meet
        wait
    else
        meet
        iperf3 -c "$peer" -t "$1" -O 0.5 -J 2>/dev/null | python3 -c '
import json, sys
sum = json.load(sys.stdin)["end"]["sum_received"]
print("RESULT test=iperf3 tag=tcp MiBps=%.3f" % (sum["bits_per_second"] / 8 / 2**20))' >>"$raw.$HOST" ||
            echo "iperf3 failed"
    fi
}
listening() { ss -Hltn 'sport = :5201' | grep -q .; }

# med TAG TEST KEY: the median over the rounds.
med() { sed -n "s/^RESULT test=$2 .*tag=$1 .*\<$3=\([0-9.]*\).*/\1/p" "$raw.$HOST" | median; }
# spread TAG TEST KEY: lowest and highest.
spread() { sed -n "s/^RESULT test=$2 .*tag=$1 .*\<$3=\([0-9.]*\).*/\1/p" "$raw.$HOST" | sort -g | sed -n '1p;$p' | paste -sd' '; }
# over A B: "A/B x".
over() { awk -v a="$1" -v b="$2" 'BEGIN { if (b > 0 && a > 0) printf "%.2f", a / b; else printf "-" }'; }

# row LABEL TEST KEY TCP-TEST: one line of the first table.
row() {
    local on off rxe tcp=0
    on=$(med on "$2" "$3") off=$(med off "$2" "$3") rxe=$(med rxe "$2" "$3")
    [ -z "${4:-}" ] || tcp=$(med tcp "$4" "$3")
    printf '%-26s %9.*f %9.*f %9.*f %9.*f   %6s %6s   %6s %6s\n' "$1" "$5" "$on" "$5" "$off" "$5" "$rxe" "$5" "$tcp" \
        "$(over "$on" "$rxe")" "$(over "$off" "$rxe")" "$(over "$on" "$tcp")" "$(over "$off" "$tcp")"
}

# Both drivers, side by side.
rxe-add
busywait 10 has_address rxe0
say "kernel $(uname -r) ($KERNEL), $(nproc) processors, hosts are $LAYOUT, mtu $(cat "/sys/class/net/$NETDEV/mtu"), $(date -u +%F)"
begun=$SECONDS

for ((round = 1; round <= rounds; round++)); do
    say "round $round of $rounds"
    load 1
    measure on "$DEV" "$seconds" $verbs_tests
    measure rxe rxe0 "$seconds" $verbs_tests
    measure tcp "$DEV" "$seconds" tcp_stream,tcp_stream:64
    iperf "$seconds"
    latencies on rxe tcp
    load 0
    measure off "$DEV" "$seconds" $verbs_tests
    latencies off
done
if [ "$HOST" = 2 ] && [ "$rounds" -gt 0 ]; then
    # Two tests of one name: the one of 64 bytes gets another.
    sed -i 's/^RESULT test=tcp_stream \(.* size=64 \)/RESULT test=tcp_rate \1/' "$raw.$HOST"
    echo
    echo "Medians of $rounds interleaved rounds of $seconds s; ratios of metaroce to rxe and to TCP (latency: below 1 is faster)."
    printf '%-26s %9s %9s %9s %9s   %6s %6s   %6s %6s\n' "" metaroce no-CRC rxe TCP "/rxe" no-CRC "/TCP" no-CRC
    row "64 KiB Write      MiB/s" write_bw MiBps tcp_stream 0
    row "64 KiB Read       MiB/s" read_bw MiBps tcp_stream 0
    row "64 KiB Send       MiB/s" send_bw MiBps tcp_stream 0
    row "64 B Writes          /s" write_rate msgps tcp_rate 0
    row "64 B half round trip us" write_lat us_p50 tcp_lat 1
    printf '%-26s %39.0f MiB/s\n' "TCP by iperf3" "$(med tcp iperf3 MiBps)"
    echo "TCP: a stream of 64 KiB calls, of 64 B calls, and a ping-pong of blocking sockets."
    for t in "on write_bw MiBps" "off write_bw MiBps" "rxe write_bw MiBps" "on write_lat us_p50" "off write_lat us_p50" "rxe write_lat us_p50"; do
        # shellcheck disable=SC2086
        echo "lowest and highest round: ${t/ / }: $(spread $t)"
    done
fi

if [ -n "$losses" ]; then
    for ((round = 1; round <= loss_rounds; round++)); do
        say "lossy links: round $round of $loss_rounds"
        for state in 1 0; do
            load $state
            for p in $losses; do
                tc qdisc replace dev "$NETDEV" root netem limit 20000 $shape loss "$p%"
                if [ $state = 1 ]; then
                    measure "on-$p" "$DEV" "$loss_seconds" write_bw
                    measure "rxe-$p" rxe0 "$loss_seconds" write_bw
                    measure "tcp-$p" "$DEV" "$loss_seconds" tcp_stream
                else
                    measure "off-$p" "$DEV" "$loss_seconds" write_bw
                fi
                tc qdisc delete dev "$NETDEV" root
            done
        done
    done
    if [ "$HOST" = 2 ]; then
        echo
        echo "64 KiB Writes, both ends behind netem $shape loss p%: MiB/s and share of the bandwidth at ${losses%% *} %."
        echo "Medians of $loss_rounds rounds of $loss_seconds s."
        printf '%-8s %18s %18s %18s %18s\n' "loss" metaroce "metaroce no-CRC" rxe TCP
        for p in $losses; do
            printf '%6s %%' "$p"
            for who in on off rxe tcp; do
                test=write_bw
                [ $who != tcp ] || test=tcp_stream
                m=$(med "$who-$p" $test MiBps) first=$(med "$who-${losses%% *}" $test MiBps)
                printf ' %9.2f %6.1f %%' "$m" "$(awk -v a="$m" -v b="$first" 'BEGIN { printf "%.1f", (b > 0) ? 100 * a / b : 0 }')"
            done
            echo
        done
    fi
fi
load 1
rdma link delete rxe0
say "took $((SECONDS - begun)) s"
meet
